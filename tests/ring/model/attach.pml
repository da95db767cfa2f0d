/* A detached cursor is attached again while its lane's writer goes on: the writer must not overrun it, and
 * must not take for corrupt what it finds meanwhile. Whoever attaches may die at any step; another goes on.
 *
 * The writer looks at heads only when what it knows to be free is used up, and a detached cursor does not
 * count. So it may, for up to a lane after its last look, write without knowing of a cursor that is being
 * opened since. The cursor therefore takes the tails as its heads twice, the second time after a full fence
 * that pairs with the one before the writer's look: if the writer did not see the cursor opening, the cursor
 * sees the tail from which the writer's knowledge counts. Between the two the first heads may lie any distance
 * back. So the cursor is OPENING until it has the second ones, and the writer takes an opening cursor's head for
 * a lower bound: one that lies more than a lane back stands for one a lane back.
 *
 * Memory is TSO, as in ring.pml. With NO_FENCE_HEADS, NO_FENCE_ATTACHED, NO_SECOND_PASS, NO_OPENING (the
 * cursor is open from the first pass on) or NO_AFRESH (who takes an opening cursor over goes on from its heads)
 * defined, spin finds a frame that is overwritten before it is read or a writer that calls its lane corrupt. */

#ifndef FRAMES
#define FRAMES 6
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define CAP 2

byte tail, head, lane[CAP];
mtype = { DETACHED, OPENING, OPEN };
mtype state = DETACHED;

mtype = { TAIL, HEAD, STATE_OPENING, STATE_OPEN, SLOT0, SLOT1 };
chan writer_stores = [4] of { mtype, byte };
chan consumer_stores = [4] of { mtype, byte };

byte kills = KILLS;
bit kill_consumer, done;

inline apply(where, value) {
    if
    :: where == TAIL -> tail = value
    :: where == HEAD -> head = value
    :: where == STATE_OPENING -> state = OPENING
    :: where == STATE_OPEN -> state = OPEN
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

#define SANE(low) (low <= at && at - low <= CAP)

proctype writer() {
    byte at, limit = CAP, low;
    mtype seen;
    do
    :: at == FRAMES -> break
    :: at < FRAMES && at < limit ->
        if
        :: at % CAP == 0 -> writer_stores ! SLOT0, at
        :: else -> writer_stores ! SLOT1, at
        fi;
        at++;
        writer_stores ! TAIL, at                      /* store_tail */
    :: at < FRAMES && at == limit ->                  /* look_at_heads */
#ifndef NO_FENCE_HEADS
        empty(writer_stores);                         /* fence_heads */
#endif
        seen = state;                                 /* load_state, then load_head */
        low = head;
        if
        :: seen == DETACHED -> limit = at + CAP
        :: seen == OPENING && SANE(low) -> limit = low + CAP
        :: seen == OPENING && !SANE(low) -> skip      /* as if it were a lane behind: look again later */
        :: seen == OPEN ->
            assert(SANE(low));                        /* else the lane is quarantined */
            limit = low + CAP
        fi
    od
}

proctype consumer() {
    byte next;

takeover:
    {
        empty(consumer_stores);                       /* a claim is a locked step; the dead one's stores are out */
#ifdef NO_AFRESH
        if
        :: state == DETACHED
#else
        if
        :: state != OPEN
#endif
           ->
            consumer_stores ! HEAD, tail;
#ifdef NO_OPENING
            consumer_stores ! STATE_OPEN, 0;
#else
            consumer_stores ! STATE_OPENING, 0;       /* store_state */
#endif
#ifndef NO_FENCE_ATTACHED
            empty(consumer_stores);                   /* fence_attached */
#endif
#ifndef NO_SECOND_PASS
            consumer_stores ! HEAD, tail;
#endif
            consumer_stores ! STATE_OPEN, 0           /* store_state */
        :: else -> skip
        fi;
        empty(consumer_stores);
        next = head;
        do
        :: next == FRAMES -> break
        :: next < FRAMES && next < tail ->
            assert(lane[next % CAP] == next);
            next++;
            consumer_stores ! HEAD, next              /* store_head */
        od;
        done = 1
    } unless {
        atomic { kill_consumer -> kill_consumer = 0 }
        goto takeover
    }
}

/* Kills whoever has the cursor KILLS times, at any step, or fewer times. */
proctype reaper() {
end:
    do
    :: atomic { kills > 0 && !kill_consumer && !done -> kills--; kill_consumer = 1 }
    :: kills >= 0 -> break
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
}
