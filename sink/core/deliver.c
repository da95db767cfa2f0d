/* The reader's loop over a step's rows, and what it touches: outfeed.sink._deliver.
 *
 * Per token the reader does a table look-up, two comparisons, two copies and an append. In Python that is most
 * of a gateway's time; here it is a fifth of a microsecond. This file does the usual row only. A row that is
 * stale, doubled, behind a gap, the last one, or too much for its sink goes to the `odd` callback, and so do all
 * decisions: Python has the rules (sink/reader.py, sink/channel.py).
 *
 * The GIL is the lock: nothing here gives it up except where it calls Python, and then what was read before is
 * read again. Offsets are those of a body that ring/checked.py let through; each row is checked against its
 * columns once more all the same, for a wrong number here would be a read outside the body.
 */

#include "fields.h"

/* ── A row ────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    const uint8_t *body;
    Py_ssize_t rows, routes, first, counts, prompt_tokens, ids, generated, text_lens, text, end;
} layout;

/* Whether every column lies within the body, in the order that deliver() walks them. Each number is bounded before
 * it is used to bound the next. */
static int layout_fits(const layout *l, Py_ssize_t size)
{
    return l->rows >= 0 && l->rows < (1 << 21) && size < MOST_BYTES && l->routes >= 0 && l->routes <= size &&
           l->first == l->routes + 8 * l->rows && l->counts == l->first + 4 * l->rows &&
           l->prompt_tokens == l->counts + 4 * l->rows && l->ids == l->prompt_tokens + 4 * l->rows &&
           l->generated >= l->ids && l->generated <= size && l->text_lens == l->generated + 4 * l->rows &&
           l->text == l->text_lens + 4 * l->rows && l->end >= l->text && l->end <= size;
}

/* Append the event to what waits and its ids to the request's (what a RESTORE will say was delivered): both or none.
 * Making a bytearray shorter fails for nobody. */
static int append_both(Live *live, Channel *channel, Event *event)
{
    Py_ssize_t had = PyByteArray_Size(live->ids), more = PyBytes_Size(event->ids_raw);
    if (more != 0 && PyByteArray_Resize(live->ids, had + more) != 0) return -1;
    if (PyList_Append(channel->fresh, (PyObject *)event) != 0) {
        PyByteArray_Resize(live->ids, had);
        return -1;
    }
    if (more != 0) memcpy(PyByteArray_AsString(live->ids) + had, PyBytes_AsString(event->ids_raw), (size_t)more);
    return 0;
}

/* Mark a channel's waiter and list it for waking, once until it has been fired. */
static int mark_waiter(Channel *channel, PyObject *wakes)
{
    PyObject *waiter = channel->waiter;
    if (waiter == NULL || waiter == Py_None) return 0;
    Py_INCREF(waiter);
    PyObject *marked = PyObject_GetAttr(waiter, name_marked);
    int failed = marked == NULL;
    /* Listed first: one that is marked and in no list would sleep for ever. */
    if (marked == Py_False) failed = PyList_Append(wakes, waiter) != 0 || PyObject_SetAttr(waiter, name_marked, Py_True) != 0;
    Py_XDECREF(marked);
    Py_DECREF(waiter);
    return failed ? -1 : 0;
}

/* The usual row. 1: delivered. 0: not usual. -1: an exception. */
static int deliver_row(Live *live, Event *event, Py_ssize_t fold_at, PyObject *wakes)
{
    Channel *channel = (Channel *)live->channel;
    if (channel == NULL) return 0; /* made without __init__ */
    long long sent = channel->sent + event->size;
    if (live->next != event->first || sent > channel->limit || channel->ended) return 0;
    if (append_both(live, channel, event) != 0) return -1;
    channel->sent = sent;
    live->columns_bytes += event->columns_bytes;
    live->next = event->first + event->generated;
    if (PyList_Size(channel->fresh) > fold_at) {
        PyObject *done = PyObject_CallMethod((PyObject *)channel, "try_fold", NULL);
        if (done == NULL) return -1;
        Py_DECREF(done);
    }
    return mark_waiter(channel, wakes) == 0 ? 1 : -1;
}

/* An ascending list of rows, met in order: rows that are not in it cost one comparison each. */
typedef struct {
    PyObject *rows; /* list */
    Py_ssize_t at, next;
} cursor;

/* Move on to the list's next row; -1 on an exception. Past the end `next` is -1, which no row is. */
static int advance(cursor *c)
{
    PyObject *row = c->at < PyList_Size(c->rows) ? PyList_GetItem(c->rows, c->at) : NULL;
    c->at++;
    c->next = row == NULL ? -1 : PyLong_AsSsize_t(row);
    return PyErr_Occurred() ? -1 : 0;
}

/* Give the event the columns at `at` of the list. */
static int attach_at(Event *event, PyObject *columns, Py_ssize_t at)
{
    PyObject *found = Py_XNewRef(PyList_GetItem(columns, at));
    int failed = found == NULL ? -1 : attach_columns(event, found);
    Py_XDECREF(found);
    return failed;
}

/* ── cut ──────────────────────────────────────────────────────────────────────────────────────────── */

/* One column being cut: `at` is where the next piece begins. */
typedef struct {
    Py_buffer buffer;
    Py_ssize_t at;
} column;

static PyObject *piece(column *c, uint64_t elements)
{
    Py_ssize_t left = c->buffer.len - c->at;
    if (elements > (uint64_t)left / 4) {
        PyErr_SetString(PyExc_ValueError, "cut: a row runs past its column");
        return NULL;
    }
    const char *from = (const char *)c->buffer.buf + c->at;
    c->at += 4 * (Py_ssize_t)elements;
    return PyBytes_FromStringAndSize(from, 4 * (Py_ssize_t)elements);
}

/* The entries of the next `count` positions; UINT64_MAX when they are not all there. */
static uint64_t entries_of(const column *lengths, uint64_t count)
{
    uint64_t sum = 0;
    if (count > (uint64_t)(lengths->buffer.len - lengths->at) / 4) return UINT64_MAX;
    for (uint64_t i = 0; i < count; i++) sum += u32_at(lengths->buffer.buf, lengths->at, (Py_ssize_t)i);
    return sum;
}

static int cut_row(PyObject *make, column *c, int ragged, uint32_t count, PyObject *parts, PyObject *sizes)
{
    uint64_t entries = ragged ? entries_of(&c[0], count) : count;
    PyObject *lengths = ragged ? piece(&c[0], count) : NULL, *made = NULL, *size = NULL;
    if (ragged && lengths == NULL) return -1;
    PyObject *values = piece(&c[1], entries), *ids = values == NULL ? NULL : piece(&c[2], entries);
    if (ids != NULL) {
        made = ragged ? PyObject_CallFunctionObjArgs(make, lengths, values, ids, NULL)
                      : PyObject_CallFunctionObjArgs(make, values, ids, NULL);
        size = PyLong_FromUnsignedLongLong(8 * entries + (ragged ? 4 * (uint64_t)count : 0));
    }
    int failed = made == NULL || size == NULL || PyList_Append(parts, made) != 0 || PyList_Append(sizes, size) != 0;
    Py_XDECREF(lengths);
    Py_XDECREF(values);
    Py_XDECREF(ids);
    Py_XDECREF(made);
    Py_XDECREF(size);
    return failed ? -1 : 0;
}

/* cut(make, counts, lengths | None, values, ids) -> (parts, bytes of each): cut a family at its rows.
 *
 * counts u32 per row, lengths u32 per position of a ragged family. A part is make(values, ids) or
 * make(lengths, values, ids). Every piece is checked against its column. */
static PyObject *cut(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *make, *given[4], *answer = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO:cut", &make, &given[0], &given[1], &given[2], &given[3])) return NULL;
    int ragged = given[1] != Py_None, held = 0, failed = 0;
    column columns[4] = {0};
    if (!ragged) given[1] = given[0]; /* held like the others, not looked at */
    while (held < 4 && PyObject_GetBuffer(given[held], &columns[held].buffer, PyBUF_SIMPLE) == 0) held++;
    PyObject *parts = PyList_New(0), *sizes = PyList_New(0);
    if (held == 4 && parts != NULL && sizes != NULL) {
        Py_ssize_t rows = columns[0].buffer.len / 4;
        for (Py_ssize_t row = 0; row < rows && !failed; row++)
            failed = cut_row(make, &columns[1], ragged, u32_at(columns[0].buffer.buf, 0, row), parts, sizes) != 0;
        if (!failed) answer = PyTuple_Pack(2, parts, sizes);
    }
    Py_XDECREF(parts);
    Py_XDECREF(sizes);
    while (held > 0) PyBuffer_Release(&columns[--held].buffer);
    return answer;
}

/* ── The loop ─────────────────────────────────────────────────────────────────────────────────────── */

/* One call of deliver(): what it was given, and how far it is. */
typedef struct {
    PyObject *table, *columns, *wakes, *odd;
    layout l;
    cursor ending, having;
    unsigned long long stamp_ns;
    Py_ssize_t fold_at;
    Py_ssize_t text, ids; /* where the next row's begin */
} delivery;

static Event *next_event(delivery *d, Py_ssize_t row)
{
    const layout *l = &d->l;
    Py_ssize_t ids_size = 4 * (Py_ssize_t)u32_at(l->body, l->counts, row);
    Py_ssize_t text_size = u32_at(l->body, l->text_lens, row);
    if (ids_size > l->generated - d->ids || text_size > l->end - d->text) {
        PyErr_Format(PyExc_ValueError, "deliver: row %zd runs past its columns", row);
        return NULL;
    }
    Event *event = make_event((PyTypeObject *)event_type,
                              PyBytes_FromStringAndSize((const char *)l->body + d->text, text_size),
                              PyBytes_FromStringAndSize((const char *)l->body + d->ids, ids_size));
    if (event == NULL) return NULL;
    event->first = u32_at(l->body, l->first, row);
    event->generated = u32_at(l->body, l->generated, row);
    event->prompt_tokens = u32_at(l->body, l->prompt_tokens, row);
    event->stamp_ns = d->stamp_ns;
    d->text += text_size, d->ids += ids_size;
    return event;
}

static int tell_odd(const delivery *d, Py_ssize_t row, PyObject *route, PyObject *live, Event *event)
{
    PyObject *index = PyLong_FromSsize_t(row), *answer = NULL;
    if (index != NULL)
        answer = PyObject_CallFunctionObjArgs(d->odd, index, route, live == NULL ? Py_None : live,
                                              (PyObject *)event, NULL);
    Py_XDECREF(index);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* 1: the row is delivered; 0: it is not usual, and `odd` knows; -1: something raised. */
static int event_row(delivery *d, Py_ssize_t row, PyObject *route, Event *event)
{
    PyObject *live = Py_XNewRef(PyDict_GetItemWithError(d->table, route));
    int usual = PyErr_Occurred() ? -1 : 0, ends = row == d->ending.next;
    if (usual == 0 && row == d->having.next &&
        (attach_at(event, d->columns, d->having.at - 1) != 0 || advance(&d->having) != 0))
        usual = -1;
    if (usual == 0 && ends && advance(&d->ending) != 0) usual = -1;
    if (usual == 0 && !ends && live != NULL && PyObject_TypeCheck(live, live_base))
        usual = deliver_row((Live *)live, event, d->fold_at, d->wakes);
    if (usual == 0) usual = tell_odd(d, row, route, live, event);
    Py_XDECREF(live);
    return usual;
}

static int next_row(delivery *d, Py_ssize_t row)
{
    uint64_t number;
    memcpy(&number, d->l.body + d->l.routes + 8 * row, 8);
    int usual = -1;
    Event *event = next_event(d, row);
    PyObject *route = event == NULL ? NULL : PyLong_FromUnsignedLongLong(number);
    if (route != NULL) usual = event_row(d, row, route, event);
    Py_XDECREF((PyObject *)event);
    Py_XDECREF(route);
    return usual;
}

/* deliver(table, body, layout, stamp_ns, ending, having, columns, fold_at, wakes, odd) -> rows delivered here.
 *
 * table: {route: Live}. layout: the number of rows, then the offsets of routes, first, counts, prompt_tokens, ids,
 * generated, text_lens, text and its end. ending: the rows, ascending, that go to `odd` in any case. having: the
 * rows, ascending, that have columns, and columns: what each has. odd(row, route, live | None, event) is called
 * for every row that is not usual, in order. */
static PyObject *deliver(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *body;
    delivery d = {0};
    layout *l = &d.l;
    if (!PyArg_ParseTuple(args, "O!S(nnnnnnnnnn)KO!O!O!nO!O:deliver", &PyDict_Type, &d.table, &body, &l->rows,
                          &l->routes, &l->first, &l->counts, &l->prompt_tokens, &l->ids, &l->generated, &l->text_lens,
                          &l->text, &l->end, &d.stamp_ns, &PyList_Type, &d.ending.rows, &PyList_Type, &d.having.rows,
                          &PyList_Type, &d.columns, &d.fold_at, &PyList_Type, &d.wakes, &d.odd))
        return NULL;
    l->body = (const uint8_t *)PyBytes_AsString(body);
    if (event_type == NULL || !layout_fits(l, PyBytes_Size(body))) {
        PyErr_SetString(PyExc_ValueError, "deliver: not bound, or a layout that does not fit its body");
        return NULL;
    }
    if (advance(&d.ending) != 0 || advance(&d.having) != 0) return NULL;
    d.text = l->text;
    d.ids = l->ids;
    Py_ssize_t delivered = 0;
    for (Py_ssize_t row = 0; row < l->rows; row++) {
        int usual = next_row(&d, row);
        if (usual < 0) return NULL;
        delivered += usual;
    }
    return PyLong_FromSsize_t(delivered);
}

/* ── The module ───────────────────────────────────────────────────────────────────────────────────── */

static void set(PyObject **place, PyObject *value)
{
    PyObject *old = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(old);
}

/* bind(ChunkEvent, Frame, Done): the classes to make events and items of. */
static PyObject *bind(PyObject *module, PyObject *args)
{
    PyObject *event, *frame, *done;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OO:bind", &PyType_Type, &event, &frame, &done)) return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)event, event_base)) {
        PyErr_SetString(PyExc_TypeError, "bind: the event class is not an Event");
        return NULL;
    }
    set(&event_type, event);
    set(&frame_type, frame);
    set(&done_type, done);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"deliver", deliver, METH_VARARGS, "Deliver a checked step's usual rows; the others go to `odd`."},
    {"cut", cut, METH_VARARGS, "Cut columns into consecutive pieces and make an object of each row of them."},
    {"bind", bind, METH_VARARGS, "Say which classes events and items are."},
    {NULL, NULL, 0, NULL}};

static int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyTypeObject **out)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return -1;
    *out = (PyTypeObject *)Py_NewRef(type);
    if (PyModule_AddObject(module, name, type) != 0) {
        Py_DECREF(type);
        return -1;
    }
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "outfeed.sink._deliver", "The reader's loop over a step's rows.", -1, methods, NULL, NULL,
    NULL, NULL};

PyMODINIT_FUNC PyInit__deliver(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    name_marked = PyUnicode_InternFromString("marked");
    name_size = PyUnicode_InternFromString("size");
    if (name_marked == NULL || name_size == NULL || add_type(module, &event_spec, "Event", &event_base) != 0 ||
        add_type(module, &channel_spec, "ChannelFields", &channel_base) != 0 ||
        add_type(module, &live_spec, "LiveFields", &live_base) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
