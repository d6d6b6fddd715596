/*
 * The protocol of calls through shared memory: src/tokenyard/kernels/numba/call and src/tokenyard/engine/turns.py.
 * Two ranks, all interleavings. tests/models/test_models.py runs it.
 *
 * A call is
 *   D  a dispatch by source: each rank writes rows into the block that the other's message names;
 *   G  a dispatch by source for which rank 1's block is too small: both tell of blocks again;
 *   P  what is read from a block of `Turns`: the parcel of a dispatch by expert, or the rows of a combine that are
 *      copied, or summed, for others first;
 *   E  the same, but rank 0 has no tokens, and rank 1 reads nothing;
 *   S  a combine of rows that are read where they lie, or in a block that is lent for that call alone;
 *   O  a combine that is asynchronous on rank 1, whose thread copies its rows and reads rank 0's later. Rank 0
 *      offers a block of `Turns`;
 *   F  a call that fails on all ranks once they have exchanged messages. Rank 0 has offered a block of `Turns`, and
 *      rank 1 tells of the failure at once, whatever its thread still does.
 * Memory holds for which call it was written; who reads it asserts that this is what it wants. A rank waits only
 * where it can take no step, so that an "invalid end state" is a deadlock. A rank ends right after its last call:
 * from then on nobody can map its memory, and what is mapped stays.
 *
 * The order of memory: ordinary stores become visible in their order, and a signal is one of them (a release).
 * Rows are streamed: such a store becomes visible at any later time, when `memory` says so, unless a fence waits
 * for it. A load may be done before a wait that comes before it, unless the wait is a load that acquires.
 *
 * Mutations, each of which must be caught. Of messages:
 *   BOX_LATER     signal a message before it is written
 *   ONE_BOX       all messages of a pair of ranks in one box
 *   EQUAL         wait until a signal equals the epoch, not until it reaches it
 *   POST_TWICE    a call that is entered again sends the message that was sent already
 * Of rows by source:
 *   NO_FENCE      signal rows without waiting for streamed stores
 *   NO_ACQUIRE    read rows before the wait for their signal has ended
 *   SAME_BLOCK    offer the memory of a result that the user still holds
 *   GROW_ALONE    only the rank whose block is too small tells of a block again
 *   OLD_BLOCK     write to the block of the first message
 * Of blocks in turn:
 *   ONE_BLOCK     one block, which each call uses again
 *   TURN_TWICE    a call that did not send its message has used up a turn
 *   NO_AWAITS     end a call that tells of a block for the first time before all have read it
 *   KNOWN_UNREAD  take a block as known to a rank that had nothing to read there, and has not mapped it.
 *   POST_FIRST    send the message before the block is filled
 *   BLOCK_FENCE   send it without waiting for streamed stores
 *   READ_UNPOSTED read a block before the message has come that tells of it
 *   POST_AHEAD    send the next message before all blocks of this call are read
 *   NO_LATER      do not wait for a rank that has said that it reads later
 * Of rows where they lie:
 *   READ_FIRST    signal that rows were read before they are
 *   NO_READ_WAIT  return from a combine before others have read its rows
 *   OWN_READY     a rank that is ready goes on without hearing whether the other is
 *   NO_COPY_WAIT  read rows that are copied later before they are
 */

#ifndef CALLS
#define CALLS 4
#endif
#ifndef KINDS
#define KINDS 4360 /* a digit for each call, the first call's lowest: D, F, O, P */
#endif

#define D 0
#define G 1
#define S 2
#define O 3
#define P 4
#define E 5
#define F 6
#define KIND (KINDS / POWER(call) % 10)
#define POWER(n) ((n) == 0 -> 1 : ((n) == 1 -> 10 : ((n) == 2 -> 100 : ((n) == 3 -> 1000 : ((n) == 4 -> 10000 : 100000)))))
#define PEER (1 - me)
#define LINE(to, from) ((to) * 2 + (from))
#ifdef ONE_BOX
#define BOX(to, from) LINE(to, from)
#else
#define BOX(to, from) (mails % 2 * 4 + LINE(to, from))
#endif
#define ROW(owner, block, source) ((owner) * 4 + (block) * 2 + (source))
#define TURN(owner, block) ((owner) * 2 + (block))
#define NO_ROOM 7 /* the block of a message that is too small */
#ifdef EQUAL
#define REACHES ==
#else
#define REACHES >=
#endif

/* Memory that ranks share. */
byte mail[4], rows[4], read_[4];              /* signals */
byte box_call[8], box_block[8], box_later[8]; /* messages: by turn, to whom, from whom */
byte row[8];                                  /* results: of each owner's two blocks, from each source */
byte part[4];                                 /* blocks in turn: two of each owner */
byte y[2];                                    /* rows of each rank's combine, where the other reads them */
byte z[2];                                    /* rows that rank 1 copies later, in a block of each call */

/* Of each rank. */
byte meets[2], reads[2];                      /* epochs */
bool mapped[4];                               /* the other's blocks in turn */
bool gone[2];

/* What rank 1 has handed to its thread, and how much of that is over. */
chan work = [CALLS] of { byte, byte };
byte handed, over;

/* A streamed store of each rank that is not visible yet. */
bool streaming[2], to_part[2];
byte stream_at[2], stream_value[2];

proctype memory(byte me)
{
end:
    do
    :: atomic {
        streaming[me] ->
        if
        :: to_part[me] -> part[stream_at[me]] = stream_value[me]
        :: else -> row[stream_at[me]] = stream_value[me]
        fi;
        streaming[me] = false
       }
    od
}

inline stream(where, is_part)
{
    atomic {
        !streaming[me];
        stream_at[me] = where;
        to_part[me] = is_part;
        stream_value[me] = call + 1;
        streaming[me] = true
    }
}

inline write_box(told, later)
{
    box_call[BOX(PEER, me)] = call + 1;
    box_block[BOX(PEER, me)] = told;
    box_later[BOX(PEER, me)] = later
}

inline post(told, later)
{
    mails++;
#ifdef BOX_LATER
    mail[LINE(PEER, me)] = mails;
    write_box(told, later)
#else
    write_box(told, later);
    mail[LINE(PEER, me)] = mails
#endif
}

inline hear()
{
    mail[LINE(me, PEER)] REACHES mails;
    assert(box_call[BOX(me, PEER)] == call + 1)
}

inline exchange(told, later)
{
    post(told, later);
    hear()
}

inline signal_rows(me)
{
    meets[me]++;
    rows[LINE(1 - me, me)] = meets[me]
}

inline signal_read(me)
{
    reads[me]++;
    read_[LINE(1 - me, me)] = reads[me]
}

/* The other's block in turn is mapped when it is first used. */
inline map(owner, block)
{
    atomic {
        assert(mapped[TURN(owner, block)] || !gone[owner]);
        mapped[TURN(owner, block)] = true
    }
}

inline read_part(owner, block)
{
    map(owner, block);
    assert(part[TURN(owner, block)] == call + 1)
}

/* Fill this rank's next block in turn, and exchange messages. */
inline offer_turn()
{
#ifndef ONE_BLOCK
    turn = 1 - turn;
#endif
#ifdef TURN_TWICE
    if
    :: me == 0 -> turn = 1 - turn
    :: true
    fi;
#endif
#ifdef POST_FIRST
    post(turn, false);
    stream(TURN(me, turn), true);
    !streaming[me];
#else
    stream(TURN(me, turn), true);
#ifndef BLOCK_FENCE
    !streaming[me];
#endif
#ifdef READ_UNPOSTED
    read_part(PEER, turn);
#endif
    post(turn, false);
#endif
    hear()
}

inline end_turn(awaits)
{
#ifndef NO_AWAITS
    if
    :: awaits || !known[turn] -> read_[LINE(me, PEER)] REACHES reads[me]
    :: else
    fi;
#endif
    known[turn] = true
}

/* The thread of rank 1. */
proctype thread()
{
    byte call, theirs;
    bool is_ahead;

end:
    do
    :: work ? call, theirs ->
#ifdef POST_AHEAD
        is_ahead = KIND == P;
#endif
        if
        :: is_ahead ->
            read_part(0, theirs);
            signal_read(1)
        :: else ->
            z[call % 2] = call + 1;
            signal_rows(1);
            rows[LINE(1, 0)] REACHES meets[1];
            read_part(0, theirs);
            signal_read(1);
            read_[LINE(1, 0)] REACHES reads[1];
            z[call % 2] = 0
        fi;
        over++
    od
}

proctype rank(byte me)
{
    byte call, mails, block, early, held, held_call, turn;
    bool known[2];

    do
    :: call < CALLS ->
        /* A synchronous call waits for the thread first. */
#ifndef POST_AHEAD
        if
        :: me == 1 && KIND != O && KIND != F -> over == handed
        :: else
        fi;
#endif
        if
        :: KIND == F && me == 0 -> offer_turn()
        :: KIND == F && me == 1 -> exchange(0, false)
        :: KIND == D || KIND == G ->
            if
            :: KIND == G ->
                exchange((me == 1 -> NO_ROOM : block), false);
                early = box_block[BOX(me, PEER)];
#ifdef GROW_ALONE
                if
                :: me == 1 -> exchange(block, false)
                :: else
                fi;
#else
                exchange(block, false);
#endif
#ifndef OLD_BLOCK
                early = box_block[BOX(me, PEER)]
#endif
            :: else ->
                exchange(block, false);
#ifdef POST_TWICE
                if
                :: me == 0 -> exchange(block, false)
                :: true
                fi;
#endif
                early = box_block[BOX(me, PEER)]
            fi;
            assert(early != NO_ROOM && !gone[PEER]);
            stream(ROW(PEER, early, me), false);
#ifndef NO_FENCE
            !streaming[me];
#endif
            signal_rows(me);
#ifdef NO_ACQUIRE
            early = row[ROW(me, block, PEER)];
            rows[LINE(me, PEER)] REACHES meets[me];
#else
            rows[LINE(me, PEER)] REACHES meets[me];
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
        :: KIND == P || KIND == E ->
            offer_turn();
#ifdef POST_AHEAD
            if
            :: me == 1 ->
                handed++;
                work ! call, box_block[BOX(me, PEER)]
            :: else ->
                read_part(PEER, box_block[BOX(me, PEER)]);
                signal_read(me);
                end_turn(false)
            fi
#else
#ifdef READ_FIRST
            signal_read(me);
#endif
            if
            :: KIND == E && me == 1 ->
#ifdef KNOWN_UNREAD
                skip
#else
                map(PEER, box_block[BOX(me, PEER)])
#endif
            :: else -> read_part(PEER, box_block[BOX(me, PEER)])
            fi;
#ifndef READ_FIRST
            signal_read(me);
#endif
            end_turn(false)
#endif
        :: KIND == O && me == 1 ->
            exchange(0, true);
            handed++;
            work ! call, box_block[BOX(me, PEER)]
        :: KIND == O && me == 0 ->
            offer_turn();
            early = box_later[BOX(me, PEER)];
#ifndef OWN_READY
            if
            :: early ->
                signal_rows(me);
#ifndef NO_COPY_WAIT
                rows[LINE(me, PEER)] REACHES meets[me]
#endif
            :: else
            fi;
#endif
            assert(z[call % 2] == call + 1);
            signal_read(me);
#ifdef NO_LATER
            end_turn(false)
#else
            end_turn(early)
#endif
        :: else ->
            y[me] = call + 1;
            exchange(0, false);
#ifdef READ_FIRST
            signal_read(me);
            assert(!gone[PEER] && y[PEER] == call + 1);
#else
            assert(!gone[PEER] && y[PEER] == call + 1);
            signal_read(me);
#endif
#ifndef NO_READ_WAIT
            read_[LINE(me, PEER)] REACHES reads[me];
#endif
            y[me] = 0 /* the rows are the user's again */
        fi;
        early = 0;
        call++
    :: else -> break
    od;
    if
    :: me == 1 -> over == handed
    :: else
    fi;
    gone[me] = true
}

init
{
    atomic {
        run memory(0);
        run memory(1);
        run thread();
        run rank(0);
        run rank(1)
    }
}
