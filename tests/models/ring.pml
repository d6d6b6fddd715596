/*
 * The ring protocol of src/tokenyard/kernels/numba/ring/protocol.py, for few ranks, all routings of two tokens
 * a rank, and all interleavings of sequentially consistent steps. tests/models/test_models.py runs it.
 *
 * A call is a dispatch (D) or a combine (K). Its slots are of one cell or of two, so that slots of one
 * call lie across those of another. A cell holds for which call and token it was written; who reads
 * it asserts that this is what it wants. A thread waits only where it can take no step, so that an
 * "invalid end state" is a deadlock; and every step moves something, so that there is no livelock.
 *
 * Left out: chunks (each record has its own stores of tail and head); counters remembered from the
 * last look, which is safe since they only grow; rows that stay on their rank, which meet no ring.
 *
 * Mutations, each of which must be caught:
 *   NO_DRAIN       write while records of an earlier call are still to be taken
 *   DRAIN_ONE      look at the head of the ring that is written to, not at all rings of that rank
 *   BLOCK          wait for room, once it is decided to send
 *   HEAD_FIRST     store the head of a record before counting it
 *   COUNT_FIRST    look at the counts before looking at the tail
 *   TAIL_FIRST     store the tail of a record before the record
 */

#ifndef R
#define R 2        /* ranks */
#endif
#ifndef C
#define C 1        /* channels: with two, each token has its own */
#endif
#ifndef THREADS
#define THREADS 1  /* of a rank: with two, each drives one channel */
#endif
#ifndef CELLS
#define CELLS 2    /* of a ring */
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef COMBINES
#define COMBINES 4 /* a bit for each call: it is a combine; 4: dispatch, dispatch, combine */
#endif
#ifndef WIDE
#define WIDE 2     /* a bit for each call: its slots are of two cells, not of one */
#endif
#ifndef SILENT
#define SILENT 0   /* a bit for each call: rank 0 has no tokens in it */
#endif

#define D 0
#define K 1
#define T 2
#define ALL 3      /* a set of both tokens */
#define IN_CHANNEL(c) (C == 1 -> ALL : 1 << (c))
#define LOWEST(set) ((set) & 1 -> 0 : 1)
#define SIZE_OF(set) (((set) & 1) + ((set) >> 1))

#define KIND(call) (COMBINES >> (call) & 1)
#define SIZE(call) (1 + (WIDE >> (call) & 1))
#define GOES(source, to, call) \
    ((source) == 0 && (SILENT >> (call) & 1) -> 0 : goes[(source) * R + (to)])
#define RING(owner, c, source) (((owner) * C + (c)) * R + (source))
#define LANE(me, peer, c) (((me) * R + (peer)) * C + (c))
#define SLOT(ring, record) ((ring) * CELLS + (record) % (CELLS / SIZE(call)) * SIZE(call))
#define WRITTEN(token) (call * T + (token) + 1)

/* Memory that ranks share. */
byte tail[R * C * R];
byte head[R * C * R];
byte cell[R * C * R * CELLS];

/* What each rank knows. */
byte goes[R * R];          /* of rank s to rank r: the set of tokens */
byte sent[R * R * C], sent_before[R * R * C], to_send[R * R * C];
byte taken[R * R * C], taken_before[R * R * C];
byte came[R * R];          /* dispatch: the set of tokens that came from a rank */
byte to_sum[R * C];        /* combine: the set of tokens that a channel has yet to sum */
byte phase[R], idle[R];    /* the call that a rank is in, and its threads that wait for the next */

#if C == 1
#define EVERY_CHANNEL(condition) condition(0)
#define DRAINED(p) (head[RING(p, 0, me)] >= sent_before[LANE(me, p, 0)])
#define TAKEN(p) (taken[LANE(me, p, 0)] - taken_before[LANE(me, p, 0)])
#else
#define EVERY_CHANNEL(condition) (condition(0) && condition(1))
#define DRAINED(p) (head[RING(p, 0, me)] >= sent_before[LANE(me, p, 0)] && \
                    head[RING(p, 1, me)] >= sent_before[LANE(me, p, 1)])
#define TAKEN(p) (taken[LANE(me, p, 0)] - taken_before[LANE(me, p, 0)] + \
                  taken[LANE(me, p, 1)] - taken_before[LANE(me, p, 1)])
#endif

#ifdef NO_DRAIN
#define RULE_1(p, c) true
#else
#ifdef DRAIN_ONE
#define RULE_1(p, c) (head[RING(p, c, me)] >= sent_before[LANE(me, p, c)])
#else
#define RULE_1(p, c) DRAINED(p)
#endif
#endif
#define RULE_2(p, c) (sent[LANE(me, p, c)] < CELLS / SIZE(call) + head[RING(p, c, me)])

#define ROOM(p, c) (RULE_1(p, c) && RULE_2(p, c))
#define OWED(p) (TAKEN(p) < SIZE_OF(GOES(p, me, call)))
#define IS_THERE(p, c) (tail[RING(me, c, p)] > taken[LANE(me, p, c)])
#define NEXT(c) LOWEST(to_sum[me * C + (c)])
#define NEEDS(p, c) ((GOES(me, p, call) >> NEXT(c)) & 1)
#define HAS_COME(p, c) (!NEEDS(p, c) || IS_THERE(p, c))
#define ALL_SENT(c) (!MINE(c) || (to_send[LANE(me, P1, c)] | to_send[LANE(me, P2, c)]) == 0)
#define ALL_SUMMED(c) (!MINE(c) || to_sum[me * C + (c)] == 0)

#define MINE(c) (begin_c <= (c) && (c) < end_c)
/* The peers. Of two ranks, P2 is this rank itself, to which nothing goes. */
#define P1 ((me + 1) % R)
#define P2 ((me + 2) % R)

inline begin(rank)
{
    for (peer : 0 .. R - 1) {
        for (c : 0 .. C - 1) {
            sent_before[LANE(rank, peer, c)] = sent[LANE(rank, peer, c)];
            taken_before[LANE(rank, peer, c)] = taken[LANE(rank, peer, c)];
            to_sum[rank * C + c] = IN_CHANNEL(c);
            to_send[LANE(rank, peer, c)] = IN_CHANNEL(c) & (KIND(phase[rank]) == D ->
                GOES(rank, peer, phase[rank]) : GOES(peer, rank, phase[rank]))
        }
        came[rank * R + peer] = 0
    }
    peer = 0;
    c = 0
}

inline write_record(p)
{
    d_step {
        token = LOWEST(to_send[LANE(me, p, c)]);
        at = SLOT(RING(p, c, me), sent[LANE(me, p, c)] - sent_before[LANE(me, p, c)]);
        to_send[LANE(me, p, c)] = to_send[LANE(me, p, c)] & ~(1 << token);
        sent[LANE(me, p, c)]++
    }
#ifdef TAIL_FIRST
    tail[RING(p, c, me)] = sent[LANE(me, p, c)];
#endif
    cell[at] = WRITTEN(token);
    if
    :: SIZE(call) == 2 -> cell[at + 1] = WRITTEN(token)
    :: else
    fi;
    tail[RING(p, c, me)] = sent[LANE(me, p, c)]
}

inline read_record(p)
{
    d_step {
        at = SLOT(RING(me, c, p), taken[LANE(me, p, c)] - taken_before[LANE(me, p, c)]);
        assert(cell[at] > call * T && cell[at] <= call * T + T);
        token = cell[at] - 1 - call * T
    }
    if
    :: SIZE(call) == 2 -> assert(cell[at + 1] == WRITTEN(token))
    :: else
    fi
}

inline take_record(p)
{
#ifdef HEAD_FIRST
    head[RING(me, c, p)] = taken[LANE(me, p, c)] + 1;
    taken[LANE(me, p, c)]++
#else
    taken[LANE(me, p, c)]++;
    head[RING(me, c, p)] = taken[LANE(me, p, c)]
#endif
}

inline receive(p)
{
    read_record(p);
    d_step {
        assert(((GOES(p, me, call) & ~came[me * R + p]) >> token) & 1);
        came[me * R + p] = came[me * R + p] | (1 << token)
    }
    take_record(p)
}

inline sum_next()
{
    for (i : 1 .. R - 1) {
        peer = (me + i) % R;
        if
        :: NEEDS(peer, c) -> read_record(peer); assert(token == NEXT(c))
        :: else
        fi
    }
    for (i : 1 .. R - 1) {
        peer = (me + i) % R;
        if
        :: NEEDS(peer, c) -> take_record(peer)
        :: else
        fi
    }
    to_sum[me * C + c] = to_sum[me * C + c] & ~(1 << NEXT(c))
}

#ifdef BLOCK
#define SEND(p, k) :: MINE(k) && to_send[LANE(me, p, k)] != 0 -> \
    c = k; peer = p; ROOM(peer, c); write_record(peer)
#else
#define SEND(p, k) :: MINE(k) && to_send[LANE(me, p, k)] != 0 && ROOM(p, k) -> \
    c = k; peer = p; write_record(peer)
#endif

#ifdef COUNT_FIRST
#define RECEIVE(p, k) :: MINE(k) && KIND(call) == D && OWED(p) -> \
    c = k; peer = p; if :: IS_THERE(peer, c) -> receive(peer) :: else fi
#else
#define RECEIVE(p, k) :: MINE(k) && KIND(call) == D && IS_THERE(p, k) && OWED(p) -> \
    c = k; peer = p; receive(peer)
#endif

#define SUM(k) :: MINE(k) && KIND(call) == K && to_sum[me * C + (k)] != 0 && \
    HAS_COME(P1, k) && HAS_COME(P2, k) -> c = k; sum_next()

/* Channels begin_c .. end_c - 1 of a rank, in all calls. */
proctype thread(byte me; byte begin_c; byte end_c)
{
    byte call, c, peer, i, token, at;

    do
    :: call < CALLS ->
        phase[me] == call;
        do
        SEND(P1, 0)
        SEND(P2, 0)
        RECEIVE(P1, 0)
        RECEIVE(P2, 0)
        SUM(0)
#if C == 2
        SEND(P1, 1)
        SEND(P2, 1)
        RECEIVE(P1, 1)
        RECEIVE(P2, 1)
        SUM(1)
#endif
        :: EVERY_CHANNEL(ALL_SENT) &&
           (KIND(call) == D -> !OWED(P1) && !OWED(P2) : EVERY_CHANNEL(ALL_SUMMED)) -> break
        od;
        skip; /* nothing may jump into a d_step */
        d_step {
            if
            :: KIND(call) == D ->
                assert(came[me * R + P1] == GOES(P1, me, call));
                assert(came[me * R + P2] == GOES(P2, me, call))
            :: else
            fi;
            call++;
            c = 0;
            token = 0;
            at = 0;
            i = 0;
            peer = 0;
            idle[me]++;
            if
            :: idle[me] == THREADS ->
                idle[me] = 0;
                phase[me]++;
                begin(me)
            :: else
            fi
        }
    :: else -> break
    od
}

init
{
    byte rank, peer, c;

    atomic {
        for (rank : 0 .. R - 1) {
            for (peer : 0 .. R - 1) {
                if
                :: rank == peer -> skip
                :: rank != peer -> goes[rank * R + peer] = ALL
#if R == 2
                :: rank != peer -> goes[rank * R + peer] = 1
                :: rank != peer -> goes[rank * R + peer] = 2
                :: rank != peer -> goes[rank * R + peer] = 0
#endif
                fi
            }
        }
        for (rank : 0 .. R - 1) {
            begin(rank)
        }
        for (rank : 0 .. R - 1) {
#if THREADS == 2
            run thread(rank, 0, 1);
            run thread(rank, 1, 2)
#else
            run thread(rank, 0, C)
#endif
        }
    }
}
