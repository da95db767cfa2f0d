/* A detached cursor is attached again while its lane's writer goes on: the writer must not overrun it.
 *
 * The writer looks at heads only when what it knows to be free is used up, and a detached cursor does not
 * count. So it may, for up to a lane after its last look, write without knowing of a cursor that has been
 * opened since. The cursor therefore takes the tails as its heads twice, the second time after a full fence
 * that pairs with the one before the writer's look: if the writer did not see the cursor open, the cursor sees the
 * tail from which the writer's knowledge counts.
 *
 * Memory is TSO, as in ring.pml. With NO_FENCE_HEADS, NO_FENCE_ATTACHED or NO_SECOND_PASS defined, spin finds
 * a frame that is overwritten before it is read. */

#define FRAMES 5
#define CAP 2

byte tail, head, lane[CAP];
bit open;

mtype = { TAIL, HEAD, OPEN, SLOT0, SLOT1 };
chan writer_stores = [4] of { mtype, byte };
chan consumer_stores = [4] of { mtype, byte };

inline apply(where, value) {
    if
    :: where == TAIL -> tail = value
    :: where == HEAD -> head = value
    :: where == OPEN -> open = value
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

proctype writer() {
    byte at, limit = CAP;
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
        if
        :: open == 0 -> limit = at + CAP
        :: open == 1 ->
            if
            :: head + CAP > limit -> limit = head + CAP
            :: else -> skip                           /* full: look again later */
            fi
        fi
    od
}

proctype consumer() {
    byte next;
    consumer_stores ! HEAD, tail;
    consumer_stores ! OPEN, 1;                        /* store_state */
#ifndef NO_FENCE_ATTACHED
    empty(consumer_stores);                           /* fence_attached */
#endif
#ifndef NO_SECOND_PASS
    consumer_stores ! HEAD, tail;
#endif
    empty(consumer_stores);
    next = head;
    do
    :: next == FRAMES -> break
    :: next < FRAMES && next < tail ->
        assert(lane[next % CAP] == next);
        next++;
        consumer_stores ! HEAD, next                  /* store_head */
    od
}

init {
    atomic {
        run drain(writer_stores);
        run drain(consumer_stores);
        run writer();
        run consumer()
    }
}
