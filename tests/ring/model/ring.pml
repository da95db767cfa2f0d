/* The ring's protocol: publish, park, wake, a full lane, death at any step, take-over.
 *
 * One writer, one consumer, a lane of CAP frames, FRAMES frames to move. A frame's number is its position.
 * Memory is TSO, the strongest order a fence is still needed on: every plain store goes through its
 * process's store buffer, which drains on its own at any time and in order. A full fence waits for it to be
 * empty; a locked operation (take_flag, a claim) does too.
 *
 * Checked by spin's exhaustive search:
 *   - no lost wake-up: sleeps have no time-out here, so one would be a deadlock (an invalid end state);
 *   - no frame lost, none seen half-written or overwritten while it is read, none twice but those a dead
 *     consumer had not released;
 *   - all that after KILLS deaths at arbitrary steps, each followed by a take-over.
 *
 * The model must be able to fail: with any one of NO_FENCE_PUBLISHED, NO_FENCE_PARKED, NO_FENCE_RELEASED,
 * NO_FENCE_ROOM, NO_SECOND_LOOK, NO_SECOND_COMPARE, NO_WAKE_ON_TAKEOVER or NO_RELEASE_ORDER defined, spin
 * finds an error.
 *
 * Names are those of ring/core: writer.c, reader.c, wait.c, bell.c, fences.h. */

#ifndef FRAMES
#define FRAMES 4
#endif
#ifndef CAP
#define CAP 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define TORN 99

/* Shared memory. */
byte tail, head, lane[CAP];
bit parked, room_parked;
/* The doorbell's word: two bits, changed only by locked steps. */
bit rung, asleep;
/* The kernel: whether the consumer sleeps on the doorbell's futex, and the writer on the lane's. */
bit in_bell, in_futex;

/* Store buffers: what is stored where. */
mtype = { TAIL, HEAD, PARKED, ROOM, SLOT0, SLOT1, SLOT2 };
chan writer_stores = [4] of { mtype, byte };
chan consumer_stores = [4] of { mtype, byte };

inline apply(where, value) {
    if
    :: where == TAIL -> tail = value
    :: where == HEAD -> head = value
    :: where == PARKED -> parked = value
    :: where == ROOM -> room_parked = value
    :: where == SLOT0 -> lane[0] = value
    :: where == SLOT1 -> lane[1] = value
    fi
}

proctype drain(chan stores) {
    mtype where;
    byte value;
end:
    do
    :: d_step { stores ? where, value; apply(where, value); where = 0; value = 0 }
    od
}

#define FENCE(stores) empty(stores)

/* Locked steps on the doorbell's word: each tells what it was. */
inline ring_bell(was_asleep) { atomic { was_asleep = asleep; rung = 1 } }
inline turn_bell(value, was_rung) { atomic { was_rung = rung; rung = 0; asleep = value } }

byte kills = KILLS;
bit kill_writer, kill_consumer;
byte handled;   /* every frame below was handled by some consumer */
byte again;     /* what a take-over may see again starts here */
bit done;

/* ── the writer ─────────────────────────────────────────────────────────── */

proctype writer() {
    byte at, least;
    bit was_asleep;

takeover:
    {
        /* A claim is a locked operation on a word the dead owner no longer writes; its stores are out. */
        FENCE(writer_stores);
        at = tail;
        room_parked = 0;
#ifndef NO_WAKE_ON_TAKEOVER
        /* The dead writer may have taken the flag and not rung, or rung and not made the call. */
        ring_bell(was_asleep);
        if
        :: was_asleep -> in_bell = 0                  /* FUTEX_WAKE, a step later */
        :: else -> skip
        fi;
#endif
        do
        :: at == FRAMES -> break
        :: else ->
            /* make_room */
            least = head;
            do
            :: at - least < CAP -> break
            :: else ->
                writer_stores ! ROOM, 1;              /* set_flag(room_parked) */
#ifndef NO_FENCE_ROOM
                FENCE(writer_stores);                 /* fence_room */
#endif
                least = head;
                if
#ifndef NO_SECOND_LOOK
                :: at - least < CAP -> skip
#endif
                :: else ->
                    /* FUTEX_WAIT: the kernel compares and sleeps in one step */
                    FENCE(writer_stores);
                    if
                    :: atomic { room_parked == 1 -> in_futex = 1 }
                       in_futex == 0
                    :: room_parked == 0 -> skip
                    fi
                fi;
                writer_stores ! ROOM, 0;
                least = head
            od;
            /* the body, in two halves */
            if
            :: at % CAP == 0 -> writer_stores ! SLOT0, TORN
            :: else -> writer_stores ! SLOT1, TORN
            fi;
#ifdef NO_RELEASE_ORDER
            writer_stores ! TAIL, at + 1;
#endif
            if
            :: at % CAP == 0 -> writer_stores ! SLOT0, at
            :: else -> writer_stores ! SLOT1, at
            fi;
            at++;
#ifndef NO_RELEASE_ORDER
            writer_stores ! TAIL, at;                 /* store_tail */
#endif
#ifndef NO_FENCE_PUBLISHED
            FENCE(writer_stores);                     /* fence_published */
#endif
            if
            :: parked == 1 ->
                FENCE(writer_stores);
                if
                :: atomic { parked == 1 -> parked = 0 }  /* take_flag */
                   ring_bell(was_asleep);             /* a step later */
                   if
                   :: was_asleep -> in_bell = 0       /* FUTEX_WAKE, a step later again */
                   :: else -> skip
                   fi
                :: parked == 0 -> skip
                fi
            :: parked == 0 -> skip
            fi
        od
    } unless {
        atomic { kill_writer -> kill_writer = 0; in_futex = 0 }
        goto takeover
    }
}

/* ── the consumer ───────────────────────────────────────────────────────── */

proctype consumer() {
    byte next, seen;
    bit was_rung;

takeover:
    {
        FENCE(consumer_stores);
        parked = 0;
        next = head;
        again = next;
#ifndef NO_WAKE_ON_TAKEOVER
        room_parked = 0;
        in_futex = 0;                                 /* FUTEX_WAKE, whatever the flag says */
#endif
        do
        :: next == FRAMES -> break
        :: else ->
            seen = tail;
            if
            :: seen == next ->
                /* wait: forget old rings, park, look once more, sleep */
                FENCE(consumer_stores);
                turn_bell(0, was_rung);
                consumer_stores ! PARKED, 1;          /* set_flag(parked) */
#ifndef NO_FENCE_PARKED
                FENCE(consumer_stores);               /* fence_parked */
#endif
                seen = tail;
                if
#ifndef NO_SECOND_LOOK
                :: seen != next -> skip
#endif
                :: else ->                            /* bell_sleep */
                    FENCE(consumer_stores);
                    turn_bell(1, was_rung);
                    if
                    :: was_rung -> skip
                    :: else ->
                        /* FUTEX_WAIT: the kernel compares and sleeps in one step */
                        if
#ifdef NO_SECOND_COMPARE
                        :: atomic { true -> in_bell = 1 }
                           in_bell == 0
#else
                        :: atomic { rung == 0 -> in_bell = 1 }
                           in_bell == 0
                        :: rung == 1 -> skip
#endif
                        fi
                    fi;
                    turn_bell(0, was_rung)
                fi;
                FENCE(consumer_stores);
                parked = 0                            /* take_flag of one's own */
            :: else ->
                /* read a frame, use it, release it */
                assert(lane[next % CAP] == next);
                assert(next <= handled);
                assert(next == handled || next >= again);
                assert(lane[next % CAP] == next);
                if
                :: next == handled -> handled++
                :: else -> skip
                fi;
                next++;
                consumer_stores ! HEAD, next;         /* store_head */
#ifndef NO_FENCE_RELEASED
                FENCE(consumer_stores);               /* fence_released */
#endif
                if
                :: room_parked == 1 ->
                    FENCE(consumer_stores);
                    if
                    :: atomic { room_parked == 1 -> room_parked = 0 } /* take_flag */
                       in_futex = 0                   /* FUTEX_WAKE, a step later */
                    :: room_parked == 0 -> skip
                    fi
                :: room_parked == 0 -> skip
                fi
            fi
        od;
        done = 1
    } unless {
        atomic { kill_consumer -> kill_consumer = 0; in_bell = 0 }
        goto takeover
    }
}

/* Kills somebody KILLS times, at any step, or fewer times. */
proctype reaper() {
end:
    do
    :: atomic { kills > 0 && !kill_writer && !kill_consumer && !done -> kills--; kill_writer = 1 }
    :: atomic { kills > 0 && !kill_writer && !kill_consumer && !done -> kills--; kill_consumer = 1 }
    :: kills == 0 -> break
    :: kills > 0 -> break
    od
}

init {
    atomic {
        run drain(writer_stores);
        run drain(consumer_stores);
        run writer();
        run consumer();
        run reaper()
    }
    (_nr_pr == 3);                                    /* only init and the drains are left */
    assert(handled == FRAMES)
}
