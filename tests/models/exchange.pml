/*
 * The protocol of calls through shared memory: src/tokenyard/kernels/numba/exchange, and the same steps of
 * the engine and the direct transport. Two ranks, all interleavings. tests/models/test_models.py runs it.
 *
 * A call is a dispatch (D), a combine of rows that others can read where they lie (S), a combine that rank 1
 * must copy its rows for (O), or a call that fails on all ranks once they have exchanged messages (F). Memory
 * holds for which call it was written; who reads it asserts that this is what it wants. A rank waits
 * only where it can take no step, so that an "invalid end state" is a deadlock.
 *
 * The order of memory: ordinary stores become visible in their order, and a signal is one of them (a release).
 * Rows are streamed: such a store becomes visible at any later time, when `memory` says so, unless a fence waits
 * for it. A load may be done before a wait that comes before it, unless the wait is a load that acquires.
 *
 * Mutations, each of which must be caught:
 *   NO_FENCE      signal rows without waiting for streamed stores
 *   NO_ACQUIRE    read rows before the wait for their signal has ended
 *   BOX_LATER     signal a message before it is written
 *   ONE_BOX       all messages of a pair of ranks in one box
 *   EQUAL         wait until a signal equals the epoch, not until it reaches it
 *   SAME_BLOCK    offer the memory of a result that the user still holds
 *   OWN_READY     a rank that is ready goes on without hearing whether the other is
 *   NO_COPY_WAIT  read rows of a combine before they were copied
 *   READ_FIRST    signal that rows were read before they are
 *   NO_READ_WAIT  return from a combine before others have read its rows
 *   POST_TWICE    the engine, which takes a call over, sends the message that was sent already
 */

#ifndef CALLS
#define CALLS 4
#endif
#ifndef KINDS
#define KINDS 230 /* a digit for each call, the first call's lowest: D, F, O, D */
#endif

#define D 0
#define S 1
#define O 2
#define F 3
#define KIND(call) (KINDS / POWER(call) % 10)
#define POWER(n) ((n) == 0 -> 1 : ((n) == 1 -> 10 : ((n) == 2 -> 100 : ((n) == 3 -> 1000 : ((n) == 4 -> 10000 : 100000)))))
#define PEER (1 - me)
#define LINE(to, from) ((to) * 2 + (from))
#ifdef ONE_BOX
#define BOX(to, from) LINE(to, from)
#else
#define BOX(to, from) (mails % 2 * 4 + LINE(to, from))
#endif
#define ROW(owner, block, source) ((owner) * 4 + (block) * 2 + (source))
#ifdef EQUAL
#define REACHES ==
#else
#define REACHES >=
#endif

/* Memory that ranks share. */
byte mail[4], rows[4], read_[4];             /* signals */
byte box_call[8], box_block[8], box_ready[8]; /* messages: by turn, to whom, from whom */
byte row[8];                                 /* of each owner's two blocks, from each source */
byte y[2];                                   /* the rows of each rank's combine, where the other reads them */

/* A streamed store of each rank that is not visible yet. */
bool streaming[2];
byte stream_at[2], stream_value[2];

proctype memory(byte me)
{
end:
    do
    :: atomic { streaming[me] -> row[stream_at[me]] = stream_value[me]; streaming[me] = false }
    od
}

inline write_box()
{
    box_call[BOX(PEER, me)] = call + 1;
    box_block[BOX(PEER, me)] = block;
    box_ready[BOX(PEER, me)] = ready
}

inline exchange()
{
    mails++;
#ifdef BOX_LATER
    mail[LINE(PEER, me)] = mails;
    write_box();
#else
    write_box();
    mail[LINE(PEER, me)] = mails;
#endif
    mail[LINE(me, PEER)] REACHES mails;
    assert(box_call[BOX(me, PEER)] == call + 1)
}

proctype rank(byte me)
{
    byte call, mails, meets, reads, block, early, held, held_call;
    bool ready, both;

    do
    :: call < CALLS ->
        ready = !(KIND(call) == O && me == 1);
        if
        :: KIND(call) != D && KIND(call) != F && ready -> y[me] = call + 1
        :: else
        fi;
        exchange();
#ifdef POST_TWICE
        if
        :: me == 0 -> exchange()
        :: true
        fi;
#endif
        if
        :: KIND(call) == F -> skip
        :: KIND(call) == D ->
            /* The peer's block, which its message names. */
            atomic {
                !streaming[me];
                stream_at[me] = ROW(PEER, box_block[BOX(me, PEER)], me);
                stream_value[me] = call + 1;
                streaming[me] = true
            }
#ifndef NO_FENCE
            !streaming[me];
#endif
            meets++;
            rows[LINE(PEER, me)] = meets;
#ifdef NO_ACQUIRE
            early = row[ROW(me, block, PEER)];
            rows[LINE(me, PEER)] REACHES meets;
#else
            rows[LINE(me, PEER)] REACHES meets;
            early = row[ROW(me, block, PEER)];
#endif
            assert(early == call + 1);
            /* The user holds a result until the next one has come. */
            if
            :: held_call > 0 -> assert(row[ROW(me, held, PEER)] == held_call)
            :: else
            fi;
            held = block;
            held_call = call + 1;
#ifndef SAME_BLOCK
            block = 1 - block
#endif
        :: else ->
#ifdef OWN_READY
            both = ready;
#else
            both = ready && box_ready[BOX(me, PEER)];
#endif
            if
            :: !ready -> y[me] = call + 1
            :: else
            fi;
            if
            :: !both ->
                meets++;
                rows[LINE(PEER, me)] = meets;
#ifndef NO_COPY_WAIT
                rows[LINE(me, PEER)] REACHES meets
#endif
            :: else
            fi;
#ifdef READ_FIRST
            reads++;
            read_[LINE(PEER, me)] = reads;
            assert(y[PEER] == call + 1);
#else
            assert(y[PEER] == call + 1);
            reads++;
            read_[LINE(PEER, me)] = reads;
#endif
#ifndef NO_READ_WAIT
            read_[LINE(me, PEER)] REACHES reads;
#endif
            y[me] = 0 /* the rows are the user's again */
        fi;
        early = 0;
        both = false;
        call++
    :: else -> break
    od
}

init
{
    atomic {
        run memory(0);
        run memory(1);
        run rank(0);
        run rank(1)
    }
}
