"""How long flows take that share links, by SimGrid: one JSON object in, one out.

In:  {"links": {name: bytes a second}, "groups": [{"flows": [[bytes, [link, ...]], ...],
      "after": [number of an earlier group, ...]}, ...]}
Out: {"seconds": when the last flow ends}

Flows of a group begin at once, when those of the groups that it comes after have ended. They share
links max-min fairly, and links carry one direction. Two flows whose first and last links are the
same take the same way. Debian's python3 runs this file (`tools/second_opinion.py`), since its
package python3-simgrid is for no other: so it imports nothing else.
"""

import json
import sys

import simgrid

OPTIONS = [
    # The links' rates are what is reached: no part of them is for TCP's own use.
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    # Whenever flows end, SimGrid shares the links anew among all that are left. At 128 ranks 16,384
    # flows end at as many moments, nanoseconds apart: end those within 0.1 us together.
    "surf/precision:1e-7",
]


def build(given: dict) -> tuple[simgrid.NetZone, dict]:
    """Links, and a host at the outer end of each that is first or last on a way."""
    zone = simgrid.NetZone.create_full_zone("ranks")
    links = {
        name: zone.create_link(name, rate).set_latency(0.0).seal()
        for name, rate in given["links"].items()
    }
    ways = {(way[0], way[-1]): way for group in given["groups"] for _, way in group["flows"]}
    ends = sorted({end for pair in ways for end in pair})
    hosts = {end: zone.create_host(end, 1e9).seal() for end in ends}
    for (first, last), way in ways.items():
        route = [simgrid.LinkInRoute(links[name]) for name in way]
        one, other = hosts[first].netpoint, hosts[last].netpoint
        zone.add_route(one, other, None, None, route, False)
    zone.seal()
    return zone, hosts


def begin(groups: list, hosts: dict, ended: list) -> None:
    """An actor for each group. `ended` gets the time when its flows have ended."""
    actors: list = []
    home = next(iter(hosts.values()))
    for group in groups:

        def run(group: dict = group) -> None:
            for number in group["after"]:
                actors[number].join()
            comms = [
                simgrid.Comm.sendto_async(hosts[way[0]], hosts[way[-1]], size)
                for size, way in group["flows"]
            ]
            simgrid.Comm.wait_all(comms)
            ended.append(simgrid.Engine.clock)

        actors.append(simgrid.Actor.create("group", home, run))


def main() -> None:
    given = json.load(sys.stdin)
    engine = simgrid.Engine(["flows", *(f"--cfg={option}" for option in OPTIONS)])
    _, hosts = build(given)
    ended: list = []
    begin(given["groups"], hosts, ended)
    engine.run()
    print(json.dumps({"seconds": max(ended)}))


main()
