"""How long flows take that share links, by SimGrid: one JSON object in, one out.

In:  {"ranks_per_node", "node_rate", "network_rate", "inside": [[from, to, bytes], ...], "outside"}
Out: {"inside": seconds, "outside": seconds}

Every rank has a link each way to its node's switch and to the network; switches never bind. Flows
share links max-min fairly. Debian's python3 runs this file (`tools/second_opinion.py`), since its
package python3-simgrid is for no other: so it imports nothing else.
"""

import json
import sys

import simgrid


def begin(zone: simgrid.NetZone, kind: str, flows: list, rate: float) -> dict:
    """Build the links of these flows, which all begin at once. The dict gets their last end."""
    hosts = {}
    for rank in sorted({end for flow in flows for end in flow[:2]}):
        # A rank sends from one host and receives on another, so that it may send to itself.
        for way in ("up", "down"):
            name = f"{kind}-{way}-{rank}"
            link = zone.create_link(name, rate).set_latency(0.0).seal()
            hosts[way, rank] = zone.create_host(name, 1e9).seal(), link
    for source, goal, _ in flows:
        (one, up), (other, down) = hosts["up", source], hosts["down", goal]
        links = [simgrid.LinkInRoute(up), simgrid.LinkInRoute(down)]
        zone.add_route(one.netpoint, other.netpoint, None, None, links, False)
    ended: dict = {"seconds": 0.0}

    def run() -> None:
        comms = [
            simgrid.Comm.sendto_async(hosts["up", source][0], hosts["down", goal][0], size)
            for source, goal, size in flows
        ]
        simgrid.Comm.wait_all(comms)
        ended["seconds"] = simgrid.Engine.clock

    if flows:
        ended["actor"] = hosts["up", flows[0][0]][0], run
    return ended


def main() -> None:
    given = json.load(sys.stdin)
    # The links' rates are what is reached: no part of them is for TCP's own use.
    options = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0"]
    engine = simgrid.Engine(["flows", *(f"--cfg={option}" for option in options)])
    zone = simgrid.NetZone.create_full_zone("ranks")
    inside = begin(zone, "node", given["inside"], given["node_rate"])
    outside = begin(zone, "network", given["outside"], given["network_rate"])
    zone.seal()
    for kind in (inside, outside):
        if "actor" in kind:
            simgrid.Actor.create("flows", *kind["actor"])
    engine.run()
    print(json.dumps({"inside": inside["seconds"], "outside": outside["seconds"]}))


main()
