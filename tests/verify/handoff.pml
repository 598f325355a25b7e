/*
 * The hand-off of KV from a prefill worker to a decode worker, for exhaustive search with spin.
 *
 * Two requests share two blocks on each worker: request 0 needs both, request 1 needs one, so that
 * whatever one of them gives back too early, or reads too late, belongs to the other by then.
 * States are those of the code, with a letter before each for its enum: T_ TransferState,
 * L_ LeaseState, S_ SequenceStatus, B_ BlockState. Every action is one atomic step of one part of
 * the code, which the comment above it names.
 *
 * The network may do more than any transport of ours does:
 * - a read is one-sided: nobody is asked before the bytes are taken, whatever is there by then;
 * - a posted read happens at any time until the fence. (One that takes its bytes early and lets
 *   them land late is no worse: its destination is set aside all the while, and what is freed in
 *   between only makes the bytes worse.)
 * - confirm, its answer and release are lost, repeated and late, beyond a restart; of those to one
 *   side for one request one is on its way at a time, and another one is lost;
 * - the call that opens a transfer is repeated to a prefill worker that was restarted.
 *
 * Bytes are modelled by whose they are: TAG(i) for those of logical block i, JUNK for what was
 * freed (worse than stale, so that nothing right is ever read by luck).
 *
 * -DMUTANT_<NAME> plants one mistake, to show that the properties can fail.
 */

#ifndef ATTEMPTS
#define ATTEMPTS 2   /* of request 0 to have its prompt computed by the prefill worker */
#endif
#ifndef CRASHES
#define CRASHES 1    /* of either worker; it is there again at once, under the same address */
#endif

#define NONE 7
#define JUNK 0
#define TAG(i) ((i) + 1)

/* Logical blocks: 0 and 1 are those of request 0, 2 is that of request 1. */
#define FIRST(r) (2 * (r))
#define LAST(r) (1 + (r))
#define NUM(r) (2 - (r))
#define OWNER(i) ((i) / 2)
#define TRIES(r) ((r) == 0 -> ATTEMPTS : 1)

mtype:transfer = { T_RESERVED, T_QUEUED, T_ACTIVE, T_LANDED, T_CONFIRMED, T_PUBLISHED,
                   T_DRAINING, T_QUIESCED, T_FREE };
mtype:lease = { L_GRANTING, L_GRANTED, L_CONFIRMED, L_RELEASED, L_EXPIRED, L_REVOKED,
                L_PEER_LOST };
mtype:status = { S_WAITING, S_AWAITING_KV, S_QUARANTINED, S_PREFILLING, S_DECODING, S_HELD,
                 S_FINISHED, S_ABORTED, S_FAILED };
mtype:block = { B_FREE, B_RESERVED, B_USED, B_QUARANTINED };
mtype:message = { M_CONFIRM, M_RELEASE, M_VALID, M_INVALID };
mtype:event = { E_ADMIT, E_OPEN, E_OPEN_UNHEARD, E_PREFILL_HERE, E_COMPUTED_HERE, E_QUARANTINE,
                E_FENCE, E_FENCE_ENDED, E_PUBLISH, E_PUBLISH_ENDED, E_FINISH, E_BEGIN,
                E_OPENED, E_GRANTED, E_VALID, E_INVALID, E_FAIL, E_DROPPED, E_FENCED, E_RENEW,
                E_RENEW_LATE, E_CONFIRM_AGAIN, E_LANDED, E_BROKEN, E_P_ADMIT, E_P_COMPUTE,
                E_CONFIRM, E_RELEASE, E_P_END, E_REVOKE, E_EXPIRE, E_ABORT, E_P_FAIL,
                E_PEER_LOST, E_LOST, E_REOPEN, E_P_CRASH, E_D_CRASH };
mtype:invariant = { INV_COVER, INV_FENCE, INV_GEN, INV_CONSERVE };
mtype:invariant broken;          /* 0, always: names the invariant in the text of an assertion */

/* The decode worker: its sequences, the transfer of each, the reads that it has posted. */
mtype:status d_seq[2] = S_WAITING;
mtype:transfer pull[2];          /* 0: there is none */
byte epoch[2];                   /* of the newest attempt; the first is 1 */
byte from[2];                    /* the incarnation that accepted it */
byte taken[2];                   /* grants that decode has taken */
bool landed[3];
byte place[3] = NONE;            /* the block table, by logical block */
byte source[3] = NONE;           /* where a posted read takes its bytes from */
byte into[3] = NONE;             /* where it puts them; NONE: no read is posted */
mtype:block d_block[2] = B_FREE;
byte d_bytes[2] = JUNK;
byte d_crashes;

/* The prefill worker: its sequences, one lease of each request, its blocks. */
mtype:status p_seq[2];           /* 0: there is none */
byte p_place[3] = NONE;
mtype:lease lease[2];            /* 0: the table does not know the transfer */
byte at_epoch[2];
byte granted[2];
byte g_block[3] = NONE;
byte g_generation[3];
mtype:block p_block[2] = B_FREE;
byte generation[2];
byte p_bytes[2] = JUNK;
byte incarnation;

chan to_prefill[2] = [1] of { mtype:message, byte, byte };   /* kind, epoch, incarnation */
chan to_decode[2] = [1] of { mtype:message, byte, byte };

/* What the properties remember; no action reads it. */
bool had_gap[2];                 /* the lease was over once */
bool was_freed[2];               /* a block was freed while the lease granted it */
bool is_valid[2];                /* VALID was said for just this attempt, by the process it is of */

/* Scratch of one atomic step; never part of a state. */
hidden byte e, n;
hidden mtype:message kind;

/* -- what is printed for the replay --------------------------------------------------------- */

#ifdef TRACE
hidden mtype:event event;
#define EVENT1(what, r)       event = what; printf("EVENT %e %d\n", event, r); tell_state()
#define EVENT3(what, r, x, y) event = what; printf("EVENT %e %d %d %d\n", event, r, x, y); tell_state()
inline tell_state() {
    printf("DECODE %e %e %e %e %d %d %d %e %e\n", d_seq[0], d_seq[1], pull[0], pull[1],
           landed[0], landed[1], landed[2], d_block[0], d_block[1]);
    printf("PREFILL %e %e %e %e %d %d %e %e %d\n", p_seq[0], p_seq[1], lease[0], lease[1],
           granted[0], granted[1], p_block[0], p_block[1], incarnation)
}
/* Endings that no action tells apart have one name in the search and their own in a trace. */
#define ENDING(name, same) name
#else
#define EVENT1(what, r)       skip
#define EVENT3(what, r, x, y) skip
#define ENDING(name, same) same
#endif

/* -- the planted mistakes that are a condition ------------------------------------------------ */

#ifdef MUTANT_IGNORE_INCARNATION
#define SAME_PROCESS(i) true
#else
#define SAME_PROCESS(i) (incarnation == (i))
#endif
#ifdef MUTANT_IGNORE_GENERATION
#define UNTOUCHED(i) true
#else
#define UNTOUCHED(i) (g_block[i] == NONE || generation[g_block[i]] == g_generation[i])
#endif
#ifdef MUTANT_IGNORE_EPOCH
#define THIS_ATTEMPT(r, e, i) true
#else
#define THIS_ATTEMPT(r, e, i) (epoch[r] == (e) && from[r] == (i))
#endif
#ifdef MUTANT_TRIM_BY_POSITION
#define PLACE_OF(i) place[((i) < 2 -> 1 - (i) : 2)]
#else
#define PLACE_OF(i) place[i]
#endif
#ifdef MUTANT_COUNT_NOTIFICATIONS
#define IS_COVERED(r) (taken[r] == NUM(r))
#else
#define IS_COVERED(r) (taken[r] == NUM(r) && HAS_LANDED(r))
#endif
#ifdef MUTANT_FREE_ON_FIRST_SIBLING_ERROR
#define IS_FENCED(r) (into[FIRST(r)] == NONE || into[LAST(r)] == NONE)
#else
#define IS_FENCED(r) NO_READ(r)
#endif

/* -- facts ---------------------------------------------------------------------------------- */

#define IS_LIVE(r) (lease[r] == L_GRANTING || lease[r] == L_GRANTED)
#define HAS_ENDED(s) ((s) == S_FINISHED || (s) == S_ABORTED || (s) == S_FAILED)
#define IS_PULLING(r) (pull[r] == T_QUEUED || pull[r] == T_ACTIVE || pull[r] == T_LANDED)
#define CAN_FAIL(r) (pull[r] == T_RESERVED || IS_PULLING(r) || pull[r] == T_CONFIRMED)
/* What decode's key names is what the prefill worker has: LeaseTable._find. */
#define KNOWS(r, e, i) (lease[r] != 0 && at_epoch[r] == (e) && SAME_PROCESS(i))
#define IS_SERVED(r) (KNOWS(r, epoch[r], from[r]) && IS_LIVE(r))
#define HAS_LANDED(r) (landed[FIRST(r)] && landed[LAST(r)])
#define NO_READ(r) (into[FIRST(r)] == NONE && into[LAST(r)] == NONE)
#define ALL_INTACT(r) (d_bytes[place[FIRST(r)]] == TAG(FIRST(r)) && d_bytes[place[LAST(r)]] == TAG(LAST(r)))
#define ALL_UNTOUCHED(r) (UNTOUCHED(FIRST(r)) && UNTOUCHED(LAST(r)))
#define NUM_FREE(blocks) ((blocks[0] == B_FREE) + (blocks[1] == B_FREE))

#define REQUIRE(invariant, fact) assert(broken == invariant || (fact))

/* -- parts of actions ----------------------------------------------------------------------- */

/* BlockPool.reserve: free blocks are alike on decode, so that the lowest stands for all. */
inline d_reserve(i) {
    place[i] = (d_block[0] == B_FREE -> 0 : 1);
    d_block[place[i]] = B_RESERVED
}

inline d_set(r, state) {
    d_block[place[FIRST(r)]] = state;
    d_block[place[LAST(r)]] = state
}

/* The destination of an attempt that is over: nothing in it is to be relied on. */
inline d_spoil(r) {
    d_bytes[place[FIRST(r)]] = JUNK;
    d_bytes[place[LAST(r)]] = JUNK
}

/* BlockPool.release */
inline d_free(r) {
    d_spoil(r);
    d_set(r, B_FREE);
    place[FIRST(r)] = NONE;
    place[LAST(r)] = NONE;
    epoch[r] = TRIES(r)   /* it has ended: no other attempt */
}

/* What a transfer knew is of no use once it has failed or was published. */
inline forget_pull(r) {
    from[r] = 0;
    taken[r] = 0;
    is_valid[r] = false;
    landed[FIRST(r)] = false;
    landed[LAST(r)] = false
}

inline end_read(i) {
    into[i] = NONE;
    source[i] = NONE
}

/* One message is on its way at most; another one is lost. */
inline send(channel, kind, e, i) {
    if :: len(channel) == 0 -> channel!kind, e, i :: else fi
}

/* ReceiverProtocol: Fail. That the owner is told may get lost. */
inline fail(r) {
    pull[r] = T_DRAINING;
    send(to_prefill[r], M_RELEASE, epoch[r], from[r]);
    forget_pull(r)
}

/* A generation is only compared with a grant's: one that no grant names may start anew. */
#define IS_NAMED(b) (g_block[0] == b || g_block[1] == b || g_block[2] == b)
inline settle_generations() {
    generation[0] = (IS_NAMED(0) -> generation[0] : 0);
    generation[1] = (IS_NAMED(1) -> generation[1] : 0)
}

inline p_free1(i) {
    if
    :: p_place[i] != NONE ->
        p_block[p_place[i]] = B_FREE;
        p_bytes[p_place[i]] = JUNK;
        was_freed[OWNER(i)] = was_freed[OWNER(i)] || (IS_LIVE(OWNER(i)) && g_block[i] == p_place[i]);
#ifndef MUTANT_KEEP_GENERATION
        generation[p_place[i]]++;
#endif
#ifndef MUTANT_RELEASE_TWICE
        p_place[i] = NONE
#endif
    :: else
    fi
}

inline p_free(r) {
    p_free1(FIRST(r));
    if :: r == 0 -> p_free1(1) :: else fi;
    settle_generations()
}

inline forget_grants(r) {
    granted[r] = 0;
    was_freed[r] = false;
    g_block[FIRST(r)] = NONE;
    g_generation[FIRST(r)] = 0;
    g_block[LAST(r)] = NONE;
    g_generation[LAST(r)] = 0;
    settle_generations()
}

/* LeaseTable._end */
inline end_lease(r, ending) {
    lease[r] = ending;
    forget_grants(r)
}

/* PrefillWorker._open: an older attempt is superseded, and what it held is freed. */
inline p_open(r) {
    p_free(r);
    end_lease(r, L_GRANTING);
    had_gap[r] = false;
    at_epoch[r] = epoch[r];
    p_seq[r] = S_WAITING
}

inline p_crash() {
    n = 0;
    do
    :: n < 2 ->
        lease[n] = 0; at_epoch[n] = 0; p_seq[n] = 0; had_gap[n] = false;
        p_block[n] = B_FREE; generation[n] = 0; p_bytes[n] = JUNK;
        p_place[FIRST(n)] = NONE;
        p_place[LAST(n)] = NONE;
        forget_grants(n);
        n++
    :: else -> break
    od;
    incarnation++
}

/* Whose request was lost, a client or a front, asks again. */
inline d_crash() {
    n = 0;
    do
    :: n < 2 ->
        d_seq[n] = (HAS_ENDED(d_seq[n]) -> d_seq[n] : S_WAITING);
        pull[n] = 0;
        forget_pull(n);
        end_read(FIRST(n));
        end_read(LAST(n));
        place[FIRST(n)] = NONE;
        place[LAST(n)] = NONE;
        d_block[n] = B_FREE; d_bytes[n] = JUNK;
        n++
    :: else -> break
    od;
    d_crashes++
}

/* -- the decode worker's loop: DecodeWorker, its scheduler and its pool ----------------------- */

inline decode(r) {
    if
    /* Roster._try_admit */
    :: d_step { d_seq[r] == S_WAITING && NUM_FREE(d_block) >= NUM(r) ->
        d_reserve(FIRST(r));
        if :: r == 0 -> d_reserve(1) :: else fi;
        d_seq[r] = S_AWAITING_KV;
        EVENT1(E_ADMIT, r) }
    /* DecodeWorker._pull_once: a prefill worker accepts */
    :: d_step { d_seq[r] == S_AWAITING_KV && pull[r] == 0 && epoch[r] < TRIES(r) ->
        epoch[r]++;
        p_open(r);
        pull[r] = T_RESERVED;
        from[r] = incarnation;
        EVENT1(E_OPEN, r) }
    /* the same, but its answer does not arrive */
    :: d_step { d_seq[r] == S_AWAITING_KV && pull[r] == 0 && epoch[r] < TRIES(r) ->
        epoch[r]++;
        p_open(r);
        EVENT1(E_OPEN_UNHEARD, r) }
    /* Scheduler.prefill_here */
    :: d_step { d_seq[r] == S_AWAITING_KV && pull[r] == 0 ->
        d_seq[r] = S_PREFILLING;
        EVENT1(E_PREFILL_HERE, r) }
    :: d_step { d_seq[r] == S_PREFILLING ->
        d_bytes[place[FIRST(r)]] = TAG(FIRST(r));
        d_bytes[place[LAST(r)]] = TAG(LAST(r));
        d_set(r, B_USED);
        d_seq[r] = S_DECODING;
        EVENT1(E_COMPUTED_HERE, r) }
    /* DecodeWorker._land, on failure: Scheduler.quarantine */
    :: d_step { d_seq[r] == S_AWAITING_KV && (pull[r] == T_DRAINING || pull[r] == T_QUIESCED) ->
        d_set(r, B_QUARANTINED);
        d_seq[r] = S_QUARANTINED;
        EVENT1(E_QUARANTINE, r) }
    /* DecodeWorker._fence, for a sequence that can be tried again */
    :: d_step { d_seq[r] == S_QUARANTINED && pull[r] == T_QUIESCED ->
        pull[r] = 0;
        d_spoil(r);
        d_set(r, B_RESERVED);
        d_seq[r] = S_AWAITING_KV;
        EVENT1(E_FENCE, r) }
    /* the same, or DecodeWorker._on_handoff_ended, for one that has ended */
    :: d_step { HAS_ENDED(d_seq[r]) && place[FIRST(r)] != NONE &&
                (pull[r] == 0 || pull[r] == T_QUIESCED || pull[r] == T_PUBLISHED) ->
        pull[r] = 0;
        d_free(r);
        EVENT1(E_FENCE_ENDED, r) }
#ifdef MUTANT_REUSE_BEFORE_FENCE
    :: d_step { HAS_ENDED(d_seq[r]) && place[FIRST(r)] != NONE && pull[r] == T_DRAINING -> d_free(r) }
#endif
    /* DecodeWorker._publish, Scheduler.publish */
#ifdef MUTANT_DROP_CONFIRM
    :: d_step { pull[r] == T_LANDED && d_seq[r] == S_AWAITING_KV ->
#else
    :: d_step { pull[r] == T_CONFIRMED && d_seq[r] == S_AWAITING_KV ->
        REQUIRE(INV_COVER, is_valid[r]);
#endif
        REQUIRE(INV_COVER, HAS_LANDED(r));
        REQUIRE(INV_COVER, ALL_INTACT(r));
        pull[r] = 0;
        forget_pull(r);
        d_set(r, B_USED);
        d_seq[r] = S_DECODING;
        EVENT1(E_PUBLISH, r) }
    /* the same for a sequence that has ended: its blocks wait for the fence */
    :: d_step { pull[r] == T_CONFIRMED && HAS_ENDED(d_seq[r]) ->
        pull[r] = T_PUBLISHED;
        forget_pull(r);
        EVENT1(E_PUBLISH_ENDED, r) }
    :: d_step { d_seq[r] == S_DECODING ->
        REQUIRE(INV_COVER, ALL_INTACT(r));
        d_free(r);
        d_seq[r] = ENDING(S_FINISHED, S_ABORTED);
        EVENT1(E_FINISH, r) }
    fi
}

/* -- the decode worker's transfer thread: Pull and ReceiverProtocol --------------------------- */

inline take_grant(r, i) {
    source[i] = g_block[i];
    into[i] = PLACE_OF(i);
    taken[r]++
}

inline transfer(r) {
    if
    :: d_step { pull[r] == T_RESERVED -> pull[r] = T_QUEUED; EVENT1(E_BEGIN, r) }
    /* LeaseTable.attach */
    :: d_step { pull[r] == T_QUEUED && IS_SERVED(r) -> pull[r] = T_ACTIVE; EVENT1(E_OPENED, r) }
    /* Granted: the reads of the new block are posted */
    :: d_step { pull[r] == T_ACTIVE && IS_SERVED(r) && taken[r] < granted[r] ->
        take_grant(r, FIRST(r) + taken[r]);
        EVENT1(E_GRANTED, r) }
    /* Answered: only an answer to this attempt counts */
    :: d_step { to_decode[r]?M_VALID, e, n ->
        if
        :: pull[r] == T_LANDED && THIS_ATTEMPT(r, e, n) -> pull[r] = T_CONFIRMED
        :: else
        fi;
        EVENT3(E_VALID, r, e, n) }
    :: d_step { to_decode[r]?M_INVALID, e, n ->
        if
        :: pull[r] == T_LANDED && THIS_ATTEMPT(r, e, n) -> fail(r)
        :: else
        fi;
        EVENT3(E_INVALID, r, e, n) }
    /* FetchSession.close: reads that are left are dropped, one by one */
    :: d_step { pull[r] == T_DRAINING && into[FIRST(r)] != NONE ->
        end_read(FIRST(r)); EVENT1(E_DROPPED, FIRST(r)) }
    :: d_step { pull[r] == T_DRAINING && r == 0 && into[1] != NONE ->
        end_read(1); EVENT1(E_DROPPED, 1) }
    /* Fenced */
    :: d_step { pull[r] == T_DRAINING && IS_FENCED(r) -> pull[r] = T_QUIESCED; EVENT1(E_FENCED, r) }
    fi
}

/* Fail: a deadline, a lost peer, an ended sequence, a lease that the owner gave up */
inline deadline(r) {
    if
    :: d_step { CAN_FAIL(r) -> fail(r); EVENT1(E_FAIL, r) }
    fi
}

/* Pull._renew, as often as it likes while it pulls; and confirm, asked again. */
inline renewal(r) {
    if
    :: d_step { IS_PULLING(r) && IS_SERVED(r) -> EVENT1(E_RENEW, r) }
    /* once it has expired or ended, a renewal is refused */
    :: d_step { IS_PULLING(r) && KNOWS(r, epoch[r], from[r]) && !IS_LIVE(r) -> fail(r); EVENT1(E_RENEW_LATE, r) }
#ifdef MUTANT_RENEW_AFTER_EXPIRY
    :: d_step { IS_PULLING(r) && KNOWS(r, epoch[r], from[r]) && lease[r] == L_EXPIRED ->
        lease[r] = (granted[r] == NUM(r) -> L_GRANTED : L_GRANTING) }
#endif
    :: d_step { pull[r] == T_LANDED && len(to_prefill[r]) == 0 ->
        send(to_prefill[r], M_CONFIRM, epoch[r], from[r]);
        EVENT1(E_CONFIRM_AGAIN, r) }
    fi
}

/* -- the network: one-sided reads ------------------------------------------------------------- */

inline land(r, i) {
    d_bytes[into[i]] = p_bytes[source[i]];
    end_read(i);
    if
    :: pull[r] == T_ACTIVE ->
        landed[i] = true;
        if
        :: IS_COVERED(r) -> pull[r] = T_LANDED; send(to_prefill[r], M_CONFIRM, epoch[r], from[r])
        :: else
        fi
    :: else
    fi
}

inline wire(i) {
    if
    :: d_step { into[i] != NONE -> land(OWNER(i), i); EVENT1(E_LANDED, i) }
    /* the read fails, or what it brings is cut short, repeated, or not what its digest says */
    :: d_step { into[i] != NONE && pull[OWNER(i)] == T_ACTIVE ->
        end_read(i);
        fail(OWNER(i));
        EVENT1(E_BROKEN, i) }
    fi
}

/* -- the prefill worker: PrefillWorker, its engine, KVSender's authority ----------------------- */

inline p_admit(r, b) {
    p_place[FIRST(r)] = b;
    p_block[b] = B_RESERVED;
    if :: r == 0 -> p_place[1] = 1 - b; p_block[1 - b] = B_RESERVED :: else fi;
    p_seq[r] = S_PREFILLING
}

/* A chunk of one block is computed, and granted if the lease still lives: LeaseTable.extend. */
inline p_compute(r, i) {
    p_bytes[p_place[i]] = TAG(i);
    p_block[p_place[i]] = B_USED;
    if :: i == LAST(r) -> p_seq[r] = S_HELD :: else fi;
    if
    :: IS_LIVE(r) ->
        g_block[i] = p_place[i];
        g_generation[i] = generation[p_place[i]];
        granted[r]++;
        if :: granted[r] == NUM(r) -> lease[r] = L_GRANTED :: else fi
    :: else
    fi
}

/* LeaseTable.confirm */
inline p_confirm(r, e, i) {
    if
    :: lease[r] == L_GRANTED && ALL_UNTOUCHED(r) ->
        REQUIRE(INV_GEN, !was_freed[r]);
        REQUIRE(INV_COVER, !had_gap[r]);
        is_valid[r] = (pull[r] == T_LANDED && at_epoch[r] == epoch[r] && incarnation == from[r]);
        end_lease(r, L_CONFIRMED)
    :: else ->
        if :: IS_LIVE(r) -> end_lease(r, L_REVOKED) :: else fi
    fi;
    if
    :: lease[r] == L_CONFIRMED -> send(to_decode[r], M_VALID, e, i)
    :: else -> send(to_decode[r], M_INVALID, e, i)
    fi
}

/* PrefillWorker.on_transfer_end may free what the lease held; an expiry is noticed by the sweep. */
#ifdef MUTANT_NO_SWEEP
#define IS_OVER(r) (lease[r] != 0 && !IS_LIVE(r) && lease[r] != L_EXPIRED)
#else
#define IS_OVER(r) (lease[r] != 0 && !IS_LIVE(r))
#endif

inline prefill(r) {
    if
    :: d_step { p_seq[r] == S_WAITING && p_block[0] == B_FREE && (r == 1 || p_block[1] == B_FREE) ->
        p_admit(r, 0); EVENT1(E_P_ADMIT, r) }
    :: d_step { p_seq[r] == S_WAITING && r == 1 && p_block[1] == B_FREE ->
        p_admit(r, 1); EVENT1(E_P_ADMIT, r) }
    :: d_step { p_seq[r] == S_PREFILLING && p_block[p_place[FIRST(r)]] == B_RESERVED ->
        p_compute(r, FIRST(r)); EVENT1(E_P_COMPUTE, r) }
    :: d_step { p_seq[r] == S_PREFILLING && r == 0 && p_block[p_place[0]] == B_USED ->
        p_compute(r, 1); EVENT1(E_P_COMPUTE, r) }
    :: d_step { to_prefill[r]?M_CONFIRM, e, n ->
        if :: KNOWS(r, e, n) -> p_confirm(r, e, n) :: else fi;
        EVENT3(E_CONFIRM, r, e, n) }
    :: d_step { to_prefill[r]?M_RELEASE, e, n ->
        if
        :: KNOWS(r, e, n) && IS_LIVE(r) -> end_lease(r, ENDING(L_RELEASED, L_REVOKED))
        :: else
        fi;
        EVENT3(E_RELEASE, r, e, n) }
    /* PrefillWorker.on_transfer_end */
    :: d_step { IS_OVER(r) && p_seq[r] != 0 && !HAS_ENDED(p_seq[r]) ->
        if
        :: p_seq[r] == S_HELD && (lease[r] == L_CONFIRMED || lease[r] == L_RELEASED) ->
            p_seq[r] = ENDING(S_FINISHED, S_ABORTED)
        :: else ->
            p_seq[r] = S_ABORTED
        fi;
        p_free(r);
        forget_grants(r);
        had_gap[r] = false;
        lease[r] = (lease[r] == L_CONFIRMED -> L_CONFIRMED : ENDING(lease[r], L_REVOKED));
        EVENT1(E_P_END, r) }
    /* PrefillWorker._on_engine_event: the sequence has failed, its blocks are free already */
    :: d_step { IS_LIVE(r) && p_seq[r] == S_FAILED -> 
        end_lease(r, L_REVOKED);
        p_seq[r] = ENDING(S_FAILED, S_ABORTED);
        EVENT1(E_REVOKE, r) }
    fi
}

/* The owner's clock. That a lease is over counts from now on, whenever the sweep sees it. */
inline expire(r) {
    had_gap[r] = true;
#ifdef MUTANT_RENEW_AFTER_EXPIRY
    lease[r] = L_EXPIRED
#else
    end_lease(r, L_EXPIRED)
#endif
}

/* A lease that nobody renews is over some day. */
inline clock(r) {
    if
    :: d_step { IS_LIVE(r) && !(IS_PULLING(r) && IS_SERVED(r)) -> expire(r); EVENT1(E_EXPIRE, r) }
    fi
}

/* -- what may go wrong, and need not ----------------------------------------------------------- */

inline faults(r) {
    if
    /* a client that leaves, a deadline, a stop: Roster.end */
    :: d_step { !HAS_ENDED(d_seq[r]) ->
        if
        :: d_seq[r] == S_AWAITING_KV -> d_set(r, B_QUARANTINED)
        :: d_seq[r] == S_PREFILLING || d_seq[r] == S_DECODING -> d_free(r)
        :: else
        fi;
        d_seq[r] = S_ABORTED;
        EVENT1(E_ABORT, r) }
    /* the prefill worker's sequence fails: its blocks are free before its lease ends */
    :: d_step { (p_seq[r] == S_WAITING || p_seq[r] == S_PREFILLING || p_seq[r] == S_HELD) ->
        p_seq[r] = (IS_LIVE(r) -> S_FAILED : ENDING(S_FAILED, S_ABORTED));
        p_free(r);
        EVENT1(E_P_FAIL, r) }
    /* renewals are late or lost */
    :: d_step { IS_LIVE(r) -> expire(r); EVENT1(E_EXPIRE, r) }
    /* the prefill worker sees that the connection is closed */
    :: d_step { IS_LIVE(r) && !(IS_PULLING(r) && IS_SERVED(r)) ->
        end_lease(r, ENDING(L_PEER_LOST, L_REVOKED));
        EVENT1(E_PEER_LOST, r) }
    :: d_step { len(to_prefill[r]) > 0 -> to_prefill[r]?kind, e, n; EVENT1(E_LOST, r) }
    :: d_step { len(to_decode[r]) > 0 -> to_decode[r]?kind, e, n; EVENT1(E_LOST, r) }
    /* the call that opened the transfer is repeated to the restarted worker */
    :: d_step { (pull[r] == T_RESERVED || IS_PULLING(r)) && lease[r] == 0 && from[r] != incarnation ->
        p_open(r); EVENT1(E_REOPEN, r) }
    fi
}

inline crashes() {
    if
    :: d_step { incarnation + d_crashes < CRASHES -> p_crash(); EVENT1(E_P_CRASH, 0) }
    :: d_step { incarnation + d_crashes < CRASHES -> d_crash(); EVENT1(E_D_CRASH, 0) }
    fi
}

/* -- properties of every state ----------------------------------------------------------------- */

#define OWNERS(table, b) ((table[0] == b) + (table[1] == b) + (table[2] == b))
/* free + reserved + used + quarantined = total, and each taken block has one owner */
#define CONSERVED(table, blocks, b) (OWNERS(table, b) == (blocks[b] != B_FREE))
#define ALL_CONSERVED (CONSERVED(place, d_block, 0) && CONSERVED(place, d_block, 1) && \
    CONSERVED(p_place, p_block, 0) && CONSERVED(p_place, p_block, 1))
/* what a posted read writes to is still its sequence's, and nothing computes into it */
#define FENCED(i) (into[i] == NONE || (d_seq[OWNER(i)] != S_PREFILLING && d_seq[OWNER(i)] != S_DECODING \
    && (place[FIRST(OWNER(i))] == into[i] || place[LAST(OWNER(i))] == into[i])))

#ifndef RELEASE
active proctype monitor() {
end:
    do
    :: d_step { !ALL_CONSERVED -> REQUIRE(INV_CONSERVE, false) }
    :: d_step { !(FENCED(0) && FENCED(1) && FENCED(2)) -> REQUIRE(INV_FENCE, false) }
    od
}
#else
/* Whatever went wrong: every block comes back, every lease and request ends. */
#define IS_IDLE (NUM_FREE(d_block) == 2 && NUM_FREE(p_block) == 2 && !IS_LIVE(0) && !IS_LIVE(1) \
    && HAS_ENDED(d_seq[0]) && HAS_ENDED(d_seq[1]))
ltl release { <>[] IS_IDLE }
#endif

/* -- who does it ------------------------------------------------------------------------------- */

/* Each worker goes on by itself: something of it happens as long as anything can. */
active proctype decode_worker() {
end:
    do
    :: decode(0) :: transfer(0)
    :: decode(1) :: transfer(1)
#if !defined(TRACE) && !defined(MUTANT_NO_DEADLINE)
    :: deadline(0) :: deadline(1)
#endif
    od
}

active proctype prefill_worker() {
end:
    do
    :: prefill(0) :: clock(0)
    :: prefill(1) :: clock(1)
    od
}

#ifdef RELEASE
/*
 * All that may happen and need not, in one process that may also do nothing for ever: fairness, which
 * goes by process and multiplies the states by their number, then forces none of it.
 */
active proctype environment() {
end:
    do
    :: renewal(0) :: renewal(1)
    :: wire(0) :: wire(1) :: wire(2)
    :: faults(0) :: faults(1)
    :: crashes()
    :: broken == 0
    od
}
#else
/* What may be repeated for ever, and must hold nothing up by it. */
active proctype repetition() {
end:
    do
    :: renewal(0)
    :: renewal(1)
    od
}

active proctype network() {
end:
    do
    :: wire(0) :: wire(1) :: wire(2)
    od
}

#define IDLE :: broken == 0
active proctype chance() {
end:
    do
    :: faults(0) :: faults(1)
    :: crashes()
#ifdef TRACE
    :: deadline(0) :: deadline(1)
    IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE   /* so that a random walk gets far */
    IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE
    IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE
    IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE IDLE
#endif
    od
}
#endif
