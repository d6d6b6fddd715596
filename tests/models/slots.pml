/*
 * The protocol of low-latency calls through shared memory: src/tokenyard/low_latency/shared.py and places.py,
 * src/tokenyard/kernels/numba/call/slots.py. R ranks, all interleavings. tests/models/test_models.py runs it.
 *
 * Calls use two places in turn. In each place a rank has a block, which others read, two boxes for messages, and two
 * signals: MAIL counts messages, READ counts the calls that the rank is done with. For each call a rank chooses:
 *   at once  it writes its block, posts a message, receives;
 *   a hook   (HOOKS) it writes and posts. It receives at any time after that, at the latest when it next uses the
 *            place; if it has dropped the hook it only signals READ then;
 *   failure  (FAILS) it posts a message without a block, signals READ, and is done. Who hears that signals READ.
 * A call tells of new memory where its block is a new one. With GROWS a call may take another block once in a place:
 * the memory of the old one goes to somebody else, and can be mapped no longer. A call that tells of new memory waits
 * until those have read it that do not receive later. Before call MEET all ranks meet in the ordinary mode.
 *
 * A rank leaves right after its last call. Others may find its memory gone only if they receive later, or if it has
 * left with a hook that it did not call. With PATIENT it signals READ for such a hook, and leaves when all others have
 * read all, as if a Buffer that is closed waited without bound: then nobody may find memory gone.
 *
 * With MASKS a rank that waits may take any rank for dead: it raises a flag for that rank, and goes on without it.
 * Who is late reads what is written meanwhile, but sees the flag when it has read, and receives again without the
 * other. With DIES the last rank may die. (A rank that waits may mask any rank that it waits for: so deadlocks of
 * calls are looked for without MASKS.)
 *
 * Memory holds for which call it was written; who reads it, and keeps what it read, asserts that this is what it
 * wants. A rank waits only where it can take no step, so that an "invalid end state" is a deadlock.
 *
 * The order of memory: ordinary stores become visible in their order, and a signal is one of them. Blocks are
 * streamed: such a store becomes visible at any later time, when `memory` says so, unless a fence waits for it; an
 * ordinary store that came before it, as of a flag, may become visible later than it unless a fence waits for that.
 * All messages of a rank's call are one box here, and all its signals of a kind one word: who sees it late looks late.
 *
 * Mutations, each of which must be caught. Of places:
 *   ONE_BLOCK      both places have the same block
 *   NO_SETTLE      use a place while the call before is not received there
 *   NO_READ_WAIT   write a block without waiting until all have read it
 *   READ_FIRST     signal READ before reading
 *   SKIP_NO_READ   a hook that is dropped does not signal READ
 *   SKIP_TWICE     a hook that was called signals READ again when it is dropped
 * Of messages:
 *   POST_FIRST     post the message before the block is written
 *   NO_FENCE       signal it without waiting for streamed stores
 *   FAIL_NO_READ   a failed call does not signal READ
 *   FAIL_EARLY     it posts without waiting until all have read what was posted before
 *   HEAR_NO_READ   who hears of a failure does not signal READ
 * Of memory:
 *   NO_AWAITS      end a call that tells of new memory before all have read it
 *   AWAIT_LATER    wait also for ranks that receive later
 *   KNOWN_LATER    take a block as known to all once a call has ended, even if some rank receives it later
 *   NO_LEAVE_WAIT  leave before those have read who receive later
 *   LEAVE_OPEN     leave with a hook that was dropped before others have read that call
 *   DROP_EARLY     give the old block back before all have read it
 * Of masks:
 *   NO_FLAG_LOOK   keep what was read without looking at flags
 *   LOOK_FIRST     look at them before reading
 *   FLAG_LATE      raise the flag after the block is written
 *   FLAG_NO_FENCE  write the block without waiting until the flag is visible
 *   WAIT_MASKED    wait for READ of a rank that is masked
 *   HEAR_NO_LOOK   take a message as it is without looking at the flag
 *   MAP_NO_LOOK    blame a rank whose memory is gone without looking at the flag again
 */

#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef MEET
#define MEET 99
#endif
#ifndef HOOKS
#define HOOKS 0 /* a bit for each rank that may use them */
#endif
#ifndef FAILS
#define FAILS 0 /* likewise */
#endif
#ifndef GROWS
#define GROWS 0 /* likewise */
#endif
#ifndef MASKS
#define MASKS 0 /* likewise: ranks that take others for dead */
#endif
#ifndef DIES
#define DIES 0
#endif

#define HAS(set, r) (((set) >> (r)) & 1)
#define AT(r, p) ((r) * 2 + (p))
#define BOX(r, p) (AT(r, p) * 2 + mails[p] % 2)
#define MAPS(owner, p, which) (((me * R + (owner)) * 2 + (p)) * 2 + (which))
#ifdef ONE_BLOCK
#define BLOCK(r, p, which) (AT(r, 0) * 2 + (which))
#else
#define BLOCK(r, p, which) (AT(r, p) * 2 + (which))
#endif

#define READY 0
#define LATER 1
#define FAILED 2

#define MAIL 0
#define READ 1

/* Memory that ranks share. */
byte mail[R * 2], read_[R * 2];                      /* signals: of each rank in each place */
byte box_call[R * 4], box_how[R * 4], box_at[R * 4]; /* messages: likewise, two in turn */
byte part[R * 4];                                    /* blocks: likewise, two that it may have */
byte flags[R];                                       /* whom this rank leaves out: a bit for each */
byte meets[R];

/* What others can map. */
bool closed[R * 4];
bool gone[R], is_open[R * 2]; /* a rank has left; with a hook of this place */
bool mapped[R * R * 4];

/* A streamed store of each rank, and a store of its flags, that are not visible yet. */
bool streaming[R];
byte stream_at[R], stream_value[R];
byte flags_soon[R];

proctype memory(byte me)
{
end:
    do
    :: atomic {
        streaming[me] ->
        part[stream_at[me]] = stream_value[me];
        streaming[me] = false;
        stream_at[me] = 0;
        stream_value[me] = 0
       }
#if MASKS
    :: atomic {
        flags_soon[me] != flags[me] -> flags[me] = flags_soon[me]
       }
#endif
    od
}

#if DIES
#define MAY_DIE if :: me == R - 1 -> goto over :: true fi;
#else
#define MAY_DIE
#endif

#define FLAGGED (flags_soon[me] == flags[me])
#define LEAVES_ME_OUT(r) HAS(flags[r], me)

inline signal_read(p)
{
    atomic {
        !streaming[me] && FLAGGED;
        reads[p]++;
        read_[AT(me, p)] = reads[p]
    }
}

#define IS_OF_NOW(r) (box_call[BOX(r, now_at)] == now_ + 1 && box_how[BOX(r, now_at)] != FAILED)

inline mask(r)
{
    atomic {
        masked = masked | (1 << r);
#ifdef FLAG_LATE
        flags_after = flags_after | (1 << r)
#else
        flags_soon[me] = flags_soon[me] | (1 << r)
#endif
    }
}

/* Wait until a signal of all others, but those in `skipped`, reaches a number; with MASKS, or mask them. */
#define SIGNALS(kind, r, p) ((kind) == READ -> read_[AT(r, p)] : mail[AT(r, p)])

inline await(kind, p, number, skipped)
{
    atomic {
        do
        :: r < R && (r == me || HAS(skipped, r) || SIGNALS(kind, r, p) >= number) -> r++
#if MASKS
        :: r < R && HAS(MASKS, me) && r != me && !HAS(skipped | masked, r) && SIGNALS(kind, r, p) < number -> mask(r)
#endif
        :: r == R -> r = 0; break
        od
    }
}

inline write_block()
{
    atomic {
        !streaming[me];
        stream_at[me] = BLOCK(me, place, block[place]);
        stream_value[me] = call + 1;
        streaming[me] = true
    }
}

/* Another block, whose predecessor goes to somebody else. */
inline may_grow(may)
{
    atomic {
        if
        :: HAS(GROWS, me) && (may) && block[place] == 0 && mails[place] > 0 ->
            closed[BLOCK(me, place, 0)] = true;
            part[BLOCK(me, place, 0)] = 0;
            block[place] = 1;
            known[place] = false
        :: true
        fi
    }
}

/* A hook is dropped when this rank leaves. */
inline leave_call(p)
{
#ifdef LEAVE_OPEN
    skip
#else
    signal_read(p)
#endif
}

inline post(as)
{
    atomic {
        FLAGGED;
        mails[place]++;
        box_call[BOX(me, place)] = call + 1
    }
    atomic {
        box_how[BOX(me, place)] = as;
        box_at[BOX(me, place)] = block[place]
    }
    atomic {
#ifndef NO_FENCE
        !streaming[me];
#endif
        mail[AT(me, place)] = mails[place]
    }
}

proctype rank(byte me)
{
    byte call, place, how;   /* the call that is made */
    byte now_, now_at;       /* the call that is received, and its place */
    byte calls_of[2];        /* the call whose hook waits in each place, from 1 */
    bool was_called[2];      /* SKIP_TWICE */
    bool settles;            /* a call is received because its place is needed */
    byte mails[2], reads[2];
    byte block[2];           /* which of its blocks a place has */
    bool known[2];           /* to all */
    bool awaits[2];
    byte masked, flags_after, waits, wrong, later, at, r;
    bool again, heard, lacks;

idle:
    MAY_DIE
    if
    :: calls_of[0] > 0 -> atomic { now_ = calls_of[0] - 1; now_at = 0; settles = false }; goto receive
    :: calls_of[1] > 0 -> atomic { now_ = calls_of[1] - 1; now_at = 1; settles = false }; goto receive
    :: call < CALLS
#ifdef PATIENT
    :: call == CALLS && calls_of[0] > 0 -> calls_of[0] = 0; leave_call(0); goto idle
    :: call == CALLS && calls_of[1] > 0 -> calls_of[1] = 0; leave_call(1); goto idle
    :: call == CALLS && calls_of[0] == 0 && calls_of[1] == 0 -> goto leave
#else
    :: call == CALLS -> goto leave
#endif
    fi;

    if
    :: call == MEET ->
        meets[me]++;
        atomic {
            do
            :: r < R && meets[r] >= meets[me] -> r++
            :: r == R -> r = 0; break
            od
        }
    :: else
    fi;

    place = call % 2;
#ifndef NO_SETTLE
    if
    :: calls_of[place] > 0 -> atomic { now_ = calls_of[place] - 1; now_at = place; settles = true }; goto receive
    :: calls_of[place] > 0 -> /* the hook was dropped */
        calls_of[place] = 0;
#ifndef SKIP_NO_READ
        signal_read(place)
#endif
#ifdef SKIP_TWICE
    :: was_called[place] -> was_called[place] = false; signal_read(place)
#endif
    :: calls_of[place] == 0
    fi;
#endif

settled:
    atomic {
        settles = false;
        if
        :: how = READY
        :: HAS(HOOKS, me) -> how = LATER
        :: HAS(FAILS, me) -> how = FAILED
        fi
    }
#ifdef DROP_EARLY
    may_grow(how != FAILED);
#endif
#ifdef WAIT_MASKED
    await(READ, place, reads[place], 0);
#else
#ifdef FAIL_EARLY
    await(READ, place, (how == FAILED -> 0 : reads[place]), masked);
#else
#ifndef NO_READ_WAIT
    await(READ, place, reads[place], masked);
#endif
#endif
#endif
    MAY_DIE

    if
    :: how == FAILED ->
        post(FAILED);
#ifndef FAIL_NO_READ
        signal_read(place);
#endif
        call++;
        goto idle
    :: else
    fi;

#ifndef FLAG_NO_FENCE
    FLAGGED;
#endif
#ifndef DROP_EARLY
    may_grow(true);
#endif
    awaits[place] = !known[place];
#ifdef POST_FIRST
    post(how);
    write_block();
    !streaming[me];
#else
    write_block();
    MAY_DIE
#ifdef FLAG_LATE
    !streaming[me];
    atomic { flags_soon[me] = flags_soon[me] | flags_after; flags_after = 0 }
#endif
    post(how);
#endif
    atomic {
        if
        :: how == LATER -> calls_of[place] = call + 1; call++; goto idle
        :: else -> now_ = call; now_at = place
        fi
    }

receive:
    MAY_DIE
    atomic { wrong = 0; again = false; heard = false; later = 0 }
#ifdef READ_FIRST
    signal_read(now_at);
#endif
    await(MAIL, now_at, mails[now_at], masked);
#ifdef LOOK_FIRST
    atomic {
        do
        :: r < R && r != me && LEAVES_ME_OUT(r) && !HAS(masked, r) -> mask(r); r++
        :: r < R && (r == me || !LEAVES_ME_OUT(r) || HAS(masked, r)) -> r++
        :: r == R -> r = 0; break
        od
    }
#endif

    /* Compare messages. Who finds another than it awaits looks at the flag after that. */
    atomic {
        do
        :: r < R && (r == me || HAS(masked, r) || IS_OF_NOW(r)) -> r++
        :: r < R && r != me && !HAS(masked, r) && !IS_OF_NOW(r) -> heard = true; break
        :: r == R -> r = 0; break
        od
    }
    if
    :: heard ->
        atomic {
#ifndef HEAR_NO_LOOK
            if
            :: LEAVES_ME_OUT(r) -> mask(r); again = true; heard = false
            :: else
            fi;
#endif
            assert(again || box_call[BOX(r, now_at)] == now_ + 1); /* else calls differ */
            r = 0
        }
    :: else
    fi;
    if
    :: again -> goto receive
    :: heard ->
#ifndef HEAR_NO_READ
        signal_read(now_at);
#endif
        goto received
    :: else
    fi;

    /* Map blocks, and read them. */
    do
    :: atomic { r < R && (r == me || HAS(masked, r)) -> r++ }
    :: atomic { r < R && r != me && !HAS(masked, r) -> at = box_at[BOX(r, now_at)] }
        atomic {
            if
            :: mapped[MAPS(r, now_at, at)]
            :: !mapped[MAPS(r, now_at, at)] && !gone[r] && !closed[BLOCK(r, now_at, at)] ->
                mapped[MAPS(r, now_at, at)] = true
            :: else -> lacks = true
            fi
        }
        atomic {
            if
            :: lacks ->
                lacks = false;
                if
#if MASKS
                :: gone[r] -> mask(r); again = true
#ifndef MAP_NO_LOOK
                :: !gone[r] && LEAVES_ME_OUT(r) -> mask(r); again = true
#endif
#endif
                :: else ->
                    /* This rank raises an error. Only of one that has left may it be so. */
#ifdef PATIENT
                    assert(false)
#else
                    assert(gone[r] && (is_open[AT(r, now_at)] || calls_of[now_at] > 0))
#endif
                fi
            :: else -> wrong = wrong | ((part[BLOCK(r, now_at, at)] != now_ + 1) << r)
            fi;
            at = 0;
            r++
        }
    :: atomic { r == R -> r = 0; break }
    od;

    /* Look at flags, and say that all is read. */
    do
    :: atomic { r < R && (r == me || HAS(masked, r)) -> later = later | (1 << r); r++ }
    :: atomic { r < R && r != me && !HAS(masked, r) -> later = later | ((box_how[BOX(r, now_at)] == LATER) << r) }
        atomic {
#if !defined(NO_FLAG_LOOK) && !defined(LOOK_FIRST)
            if
            :: LEAVES_ME_OUT(r) -> mask(r); again = true
            :: else
            fi;
#endif
            r++
        }
    :: atomic { r == R -> r = 0; break }
    od;
    if
    :: again -> goto receive
    :: else
    fi;
    atomic { assert((wrong & ~masked) == 0); wrong = 0 } /* what is kept is right */
    MAY_DIE
#ifndef READ_FIRST
    signal_read(now_at);
#endif
#ifdef AWAIT_LATER
    waits = awaits[now_at];
    later = masked;
#else
#ifndef NO_AWAITS
    waits = awaits[now_at];
#endif
#endif
    if
    :: waits ->
        waits = 0;
        do
        :: atomic { r < R && (r == me || HAS(later, r) || read_[AT(r, now_at)] >= reads[now_at]) -> r++ }
#if MASKS
        :: atomic { r < R && HAS(MASKS, me) -> r = 0; break } /* who is late is not masked any more */
#endif
        :: atomic { r == R -> r = 0; break }
        od
    :: else
    fi;
#ifdef KNOWN_LATER
    if
    :: calls_of[now_at] == 0 -> known[now_at] = true
#else
    if
    :: calls_of[now_at] == 0 && (later & ~masked & ~(1 << me)) == 0 -> known[now_at] = true
#endif
    :: else
    fi;

received:
    atomic {
        awaits[now_at] = false;
        heard = false;
        later = 0;
        wrong = 0;
        now_ = 0;
        if
        :: calls_of[now_at] == 0 -> call++; now_at = 0; goto idle
        :: calls_of[now_at] > 0 ->
#ifdef SKIP_TWICE
            was_called[now_at] = true;
#endif
            calls_of[now_at] = 0;
            now_at = 0;
            if
            :: settles -> goto settled
            :: else -> goto idle
            fi
        fi
    }

leave:
#ifdef PATIENT
#ifndef NO_LEAVE_WAIT
    do
    :: atomic {
        r < 2 * R && (r / 2 == me || HAS(masked, r / 2) || gone[r / 2] || read_[r] >= reads[r % 2]) -> r++
       }
#ifdef LEAVE_OPEN
    :: atomic { r < 2 * R && mails[r % 2] > reads[r % 2] -> r++ }
#endif
    :: atomic { r == 2 * R -> r = 0; break }
    od;
#endif
#endif
    atomic {
        is_open[AT(me, 0)] = calls_of[0] > 0;
        is_open[AT(me, 1)] = calls_of[1] > 0;
        gone[me] = true
    }
over:
    skip
}

init
{
    byte r;
    atomic {
        do
        :: r < R -> run memory(r); run rank(r); r++
        :: else -> break
        od
    }
}
