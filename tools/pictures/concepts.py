"""The five pictures of docs/concepts."""

from __future__ import annotations

from tools.pictures.canvas import RANKS, Canvas

BLUE, ORANGE, GREEN, PURPLE = RANKS


def stages() -> Canvas:
    """Upright, so that a phone shows all of it."""
    c = Canvas(
        450,
        470,
        "Two ranks go through layout, notify, dispatch, experts and combine. Counts cross in "
        "notify, rows in dispatch, and rows back in combine.",
    )
    told = {
        "layout": ("who gets each token,", "nothing is exchanged"),
        "notify": ("how much arrives,", "all agree or all raise"),
        "dispatch": ("rows move, once", "for each rank"),
        "experts": ("your code, on the", "rows that arrived"),
        "combine": ("rows go back", "and are summed"),
    }
    crossing = {"notify": ("counts", 1.6), "dispatch": ("rows", 3.2), "combine": ("rows back", 3.2)}
    for rank, x in enumerate((154, 326)):
        c.panel((x, 10), (114, 450), RANKS[rank], f"rank {rank}")
    for n, (name, lines) in enumerate(told.items()):
        y = 70 + 86 * n
        c.lines((8, y - 8), lines, "soft", size=13, anchor="start")
        for rank, x in enumerate((211, 383)):
            c.box((x, y), (92, 40), name, RANKS[rank])
            if n < len(told) - 1:
                c.arrow([(x, y + 22), (x, y + 62)])
        if name in crossing:
            words, width = crossing[name]
            c.arrow([(259, y - 7), (333, y - 7)], BLUE, width=width)
            c.arrow([(335, y + 9), (261, y + 9)], ORANGE, width=width)
            c.text((297, y - 24), words)
    return c


def life_of_a_row() -> Canvas:
    c = Canvas(
        860,
        330,
        "A token of rank 0 chose experts 4, 5 and 6. One row of it goes to rank 2, which has two "
        "of them, and one to rank 3. Their results come back to rank 0 and are summed by rank.",
    )
    c.panel((10, 20), (180, 290), BLUE, "rank 0")
    for n in range(4):
        y = 78 + 34 * n
        c.box((75, y), (96, 26), f"token {n}", BLUE if n == 2 else None)
    c.number((164, 146), 1)
    c.lines((24, 236), ("token 2 chose", "experts 4, 5 and 6"), "soft", size=13, anchor="start")
    c.panel((290, 20), (330, 135), GREEN, "rank 2: experts 4 and 5")
    c.panel((290, 175), (330, 135), PURPLE, "rank 3: experts 6 and 7")
    c.box((345, 100), (90, 30), "one row", GREEN)
    c.box((470, 77), (84, 30), "expert 4")
    c.box((470, 123), (84, 30), "expert 5")
    c.box((575, 100), (60, 30), "sum", GREEN)
    c.box((345, 255), (90, 30), "one row", PURPLE)
    c.box((470, 255), (84, 30), "expert 6")
    c.box((575, 255), (60, 30), "result", PURPLE)
    for y in (77, 123):
        c.arrow([(391, 100), (427, y)])
        c.arrow([(513, y), (544, 100)])
    c.arrow([(391, 255), (427, 255)])
    c.arrow([(513, 255), (544, 255)])
    c.arrow([(178, 146), (299, 100)], BLUE, width=3)
    c.arrow([(178, 146), (299, 255)], BLUE, width=3)
    c.number((240, 100), 2)
    c.number((522, 52), 3)
    c.number((522, 207), 3)
    c.panel((720, 20), (130, 290), BLUE, "rank 0")
    c.arrow([(606, 100), (735, 148)], GREEN, width=3)
    c.arrow([(606, 255), (735, 180)], PURPLE, width=3)
    c.number((668, 100), 4)
    c.box((785, 164), (98, 44), "sum", BLUE)
    c.number((785, 122), 5)
    c.lines((785, 216), ("rank 2's row,", "then rank 3's,", "rounded once"), "soft", size=13)
    return c


def two_levels() -> Canvas:
    c = Canvas(
        820,
        330,
        "Two nodes of two ranks. In dispatch rank 0 sends one row over the network to rank 2, "
        "which passes it on to rank 3 in memory. In combine rank 2 sums both and sends one "
        "row back.",
    )
    for left, name in ((10, "dispatch"), (420, "combine")):
        c.text((left + 195, 22), name, size=16, weight=600)
        c.panel((left, 40), (120, 225), "#6b7686", "node 0")
        c.panel((left + 270, 40), (120, 225), "#6b7686", "node 1")
        for rank in range(4):
            x, y = left + 60 + 270 * (rank // 2), 100 + 115 * (rank % 2)
            c.box((x, y), (86, 34), f"rank {rank}", RANKS[rank])
        c.arrow([(left + 104, 215), (left + 286, 215)], dashed=True, head=False)
        c.text((left + 195, 208), "rail 1", "soft", size=13)
    c.arrow([(70, 118), (70, 197)], BLUE, width=3)
    c.arrow([(114, 100), (296, 100)], BLUE, width=3)
    c.arrow([(340, 118), (340, 197)], BLUE, width=3)
    c.text((205, 90), "rail 0: one row", size=13)
    c.text((205, 122), "for the whole node", "soft", size=13)
    c.arrow([(480, 197), (480, 118)], ORANGE, width=3)
    c.arrow([(750, 197), (750, 118)], PURPLE, width=3)
    c.arrow([(706, 100), (524, 100)], GREEN, width=3)
    c.text((615, 90), "rail 0: one sum", size=13)
    c.text((615, 122), "of ranks 2 and 3", "soft", size=13)
    for left in (10, 420):
        c.text((left + 68, 162), "memory", "soft", size=12, anchor="start")
        c.text((left + 338, 162), "memory", "soft", size=12, anchor="start")
    c.text((205, 292), "A token of rank 0 chose experts on ranks 1, 2 and 3.", "soft", size=13)
    c.text((615, 292), "Rank 0 adds up node 0, then node 1's sum.", "soft", size=13)
    c.text((410, 318), "Grey frames share memory; only rails cross the network.", "soft", size=13)
    return c


def ring() -> Canvas:
    c = Canvas(
        820,
        320,
        "A ring of eight slots in the owner's memory. The source has written eight records, the "
        "owner has taken five; records 5, 6 and 7 wait in slots 5, 6 and 7.",
    )
    c.panel((10, 60), (190, 190), BLUE, "source: rank s")
    c.panel((260, 10), (550, 300), GREEN, "owner: rank r, in whose memory the ring lies")
    centre = (410.0, 162.0)
    for slot in range(8):
        waits = slot in (5, 6, 7)
        c.slice(centre, (54, 100), (45 * slot, 45 * slot + 45), str(slot), BLUE if waits else None)
    c.text((410, 158), "slots", "soft", size=13)
    c.text((410, 176), "record % 8", "soft", size=13)
    c.lines(
        (24, 112),
        ("writes record 8", "into slot 0, since", "8 < 8 slots + head", "", "then tail = 9"),
        size=14,
        anchor="start",
    )
    c.arrow([(165, 107), (226, 46), (448, 46), (448, 68)], BLUE, width=3)
    c.arrow([(318, 200), (278, 200), (278, 294), (655, 294), (655, 262)], GREEN, width=3)
    c.text((466, 286), "takes record 5 from slot 5", "soft", size=13, anchor="middle")
    c.box((655, 100), (96, 34), "tail = 8", BLUE)
    c.lines((655, 138), ("records ever written:", "the source alone writes it"), "soft", size=13)
    c.box((655, 198), (96, 34), "head = 5", GREEN)
    c.lines((655, 236), ("records ever taken:", "the owner alone writes it"), "soft", size=13)
    return c


def post() -> Canvas:
    c = Canvas(
        820,
        350,
        "Rank 0 lays its tokens out in a block and then writes the number of the call into its "
        "post. Rank 1 waits for that number, copies the rows of its experts into their slots, "
        "and marks the block as read.",
    )
    c.panel((10, 14), (360, 322), BLUE, "rank 0")
    c.box((110, 70), (150, 34), "x, topk_idx")
    c.arrow([(110, 89), (110, 124)], BLUE, width=3)
    c.number((140, 106), 1)
    c.text((24, 144), "block: room for num_max tokens", "soft", size=13, anchor="start")
    for n in range(4):
        for left, width in ((24, 96), (124, 226)):
            is_used = n < 3
            c.box((left + width / 2, 168 + 26 * n), (width, 22), "", BLUE if is_used else None)
    for n, chosen in enumerate(("0, 3", "2, 1", "3, 2")):
        c.text((72, 173 + 26 * n), chosen, "white", size=13)
        c.text((237, 173 + 26 * n), f"token {n}", "white", size=13)
    c.text((72, 273), "topk_idx", "soft", size=13)
    c.text((237, 273), "rows", "soft", size=13)
    c.box((90, 308), (130, 34), "post: call 7", BLUE)
    c.number((172, 308), 2)
    c.text((190, 313), "written last", "soft", size=13, anchor="start")
    c.panel((470, 14), (340, 322), ORANGE, "rank 1: experts 2 and 3")
    rows = (("expert 2", ("token 1", "token 2", "")), ("expert 3", ("token 0", "token 2", "")))
    for e, (name, tokens) in enumerate(rows):
        top = 78 + 116 * e
        c.text((600, top - 18), name, anchor="start")
        for n, words in enumerate(tokens):
            c.box((690, top + 26 * n), (180, 22), words, BLUE if words else None)
    c.text((690, 278), "slots by (source rank, token)", "soft", size=13)
    c.arrow([(353, 194), (420, 194), (420, 78), (594, 78)], BLUE, width=3)
    c.arrow([(353, 220), (594, 220)], BLUE, width=3)
    c.number((420, 130), 4)
    c.arrow([(482, 300), (278, 300)], ORANGE, width=1.8, dashed=True)
    c.number((420, 300), 3)
    c.text((490, 305), "waits for post 7 of every rank", size=13, anchor="start")
    c.number((500, 322), 5)
    c.text((518, 327), 'says "read 7": the block is free again', "soft", size=13, anchor="start")
    return c


def balancing() -> Canvas:
    c = Canvas(
        760,
        330,
        "A step of two ranks. Without a balance rank 1 waits for rank 0, whose experts were chosen "
        "more often. With a balance rank 1 reads the weights of one of them, and computes some of "
        "its pairs, so that both end at once.",
    )
    own = {0: (("expert 0", 220), ("1", 60), ("2", 60)), 1: (("3", 60), ("4", 50), ("5", 50))}
    shared = {0: (("expert 0", 130), ("1", 60), ("2", 60)), 1: (*own[1], ("expert 0", 90))}
    for title, top, each in (("by owner", 14, own), ("with a balance", 176, shared)):
        c.text((14, top + 16), title, weight=600, anchor="start")
        for rank, parts in each.items():
            x, y = 150.0, top + 48 + 58 * rank
            c.text((14, y + 5), f"rank {rank}", "soft", anchor="start")
            c.box((120, y), (44, 36), "", None)
            c.text((120, y + 5), "send", "soft", size=12)
            for name, width in parts:
                colour = RANKS[0] if rank == 0 or name == "expert 0" else RANKS[1]
                c.box((x + width / 2, y), (width - 3, 36), name, colour)
                x += width
            if x < 470 and each is own:
                c.text(((x + 490) / 2, y + 5), "waits for rank 0", "soft")
            end = 490 if each is own else 400
            c.box((end + 36, y), (60, 36), "", None)
            c.text((end + 36, y + 5), "sums", "soft", size=12)
    c.arrow([(215, 244), (355, 262)], RANKS[0], dashed=True)
    c.lines(
        (480, 278),
        ["rank 1 reads the weights of", "expert 0 where they lie"],
        "soft",
        anchor="start",
    )
    return c


PICTURES = (stages, life_of_a_row, two_levels, ring, post, balancing)
