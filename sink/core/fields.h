/* The three objects that the reader's loop touches, as Python types: an event, a channel, a live request.
 *
 * Their Python subclasses (sink/events.py, channel.py, live.py) have the rules; these have the fields, so that
 * deliver.c reads and writes them without going through Python. Included by deliver.c alone.
 */
#ifndef OUTFEED_FIELDS_H
#define OUTFEED_FIELDS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* Set once by bind(): the Python classes this file makes. Beside them what the module makes as it is imported. */
static PyObject *event_type, *frame_type, *done_type, *name_marked, *name_size;
static PyTypeObject *event_base, *channel_base, *live_base;

static void drop(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static uint32_t u32_at(const uint8_t *body, Py_ssize_t column, Py_ssize_t row)
{
    uint32_t value;
    memcpy(&value, body + column + 4 * row, 4);
    return value;
}

/* ── Event: a row's own bytes and numbers ─────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PyObject *text_utf8, *ids_raw, *finish, *columns;
    unsigned long long first, generated, prompt_tokens, stamp_ns;
    long long columns_bytes, size; /* what a sink counts: of `columns`, and of the text and the ids too */
} Event;

/* Made whole and never changed but for `finish`: a sink counts what it let in, and takes out the same. */
static PyMemberDef event_members[] = {
    {"text_utf8", T_OBJECT_EX, offsetof(Event, text_utf8), READONLY, NULL},
    {"ids_raw", T_OBJECT_EX, offsetof(Event, ids_raw), READONLY, NULL},
    {"finish", T_OBJECT, offsetof(Event, finish), 0, NULL},
    {"columns", T_OBJECT, offsetof(Event, columns), READONLY, NULL},
    {"columns_bytes", T_LONGLONG, offsetof(Event, columns_bytes), READONLY, NULL},
    {"size", T_LONGLONG, offsetof(Event, size), READONLY, NULL},
    {"first", T_ULONGLONG, offsetof(Event, first), READONLY, NULL},
    {"generated", T_ULONGLONG, offsetof(Event, generated), READONLY, NULL},
    {"prompt_tokens", T_ULONGLONG, offsetof(Event, prompt_tokens), READONLY, NULL},
    {"stamp_ns", T_ULONGLONG, offsetof(Event, stamp_ns), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

/* More than any memory has: no sum of sizes comes near what a long long holds. */
#define MOST_BYTES ((long long)1 << 40)

/* Give a new event its columns and take their size from them. */
static int attach_columns(Event *event, PyObject *columns)
{
    if (columns == Py_None) return 0;
    PyObject *number = PyObject_GetAttr(columns, name_size);
    if (number == NULL) return -1;
    long long size = PyLong_AsLongLong(number);
    Py_DECREF(number);
    if (size == -1 && PyErr_Occurred()) return -1;
    if (size < 0 || size > MOST_BYTES) {
        PyErr_Format(PyExc_ValueError, "columns have a size of %lld: expected 0 to %lld bytes", size, MOST_BYTES);
        return -1;
    }
    PyObject *old = event->columns;
    event->columns = Py_NewRef(columns);
    event->columns_bytes = size;
    event->size += size;
    Py_XDECREF(old);
    return 0;
}

/* An event of these two (stolen; NULL: failed), without a finish reason or columns. */
static Event *make_event(PyTypeObject *type, PyObject *text, PyObject *ids)
{
    Event *event = text == NULL || ids == NULL ? NULL : (Event *)PyType_GenericAlloc(type, 0);
    if (event == NULL) {
        Py_XDECREF(text);
        Py_XDECREF(ids);
        return NULL;
    }
    event->text_utf8 = text;
    event->ids_raw = ids;
    event->finish = Py_NewRef(Py_None);
    event->columns = Py_NewRef(Py_None);
    event->size = PyBytes_Size(text) + PyBytes_Size(ids);
    return event;
}

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"text_utf8",     "ids_raw",  "first",  "generated",
                            "prompt_tokens", "stamp_ns", "finish", "columns", NULL};
    PyObject *text, *ids, *finish = Py_None, *columns = Py_None, *numbers[4];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "SSOOOO|OO:ChunkEvent", names, &text, &ids, &numbers[0],
                                     &numbers[1], &numbers[2], &numbers[3], &finish, &columns))
        return NULL;
    unsigned long long values[4];
    for (int i = 0; i < 4; i++) {
        values[i] = PyLong_AsUnsignedLongLong(numbers[i]);
        if (values[i] == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    }
    Event *self = make_event(type, Py_NewRef(text), Py_NewRef(ids));
    if (self == NULL) return NULL;
    self->first = values[0];
    self->generated = values[1];
    self->prompt_tokens = values[2];
    self->stamp_ns = values[3];
    PyObject *none = self->finish;
    self->finish = Py_NewRef(finish);
    Py_DECREF(none);
    if (attach_columns(self, columns) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void event_dealloc(PyObject *object)
{
    Event *self = (Event *)object;
    Py_XDECREF(self->text_utf8);
    Py_XDECREF(self->ids_raw);
    Py_XDECREF(self->finish);
    Py_XDECREF(self->columns);
    drop(object);
}

/* Not a garbage-collected type: nothing an event holds can lead back to it. */
static PyType_Slot event_slots[] = {{Py_tp_new, event_new},
                                    {Py_tp_dealloc, event_dealloc},
                                    {Py_tp_members, event_members},
                                    {Py_tp_doc, "A run of output tokens; ChunkEvent is its public face."},
                                    {0, NULL}};
static PyType_Spec event_spec = {"outfeed.sink._deliver.Event", sizeof(Event), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, event_slots};

/* ── Channel: what the two ends of a sink share ───────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PyObject *fresh; /* list of items, oldest first */
    PyObject *folded, *waiter, *on_gone;
    long long capacity, sent, taken, freed, limit, received, merged;
    char folding, gone, ended;
} Channel;

static PyMemberDef channel_members[] = {
    {"fresh", T_OBJECT_EX, offsetof(Channel, fresh), READONLY, NULL},
    {"folded", T_OBJECT, offsetof(Channel, folded), 0, NULL},
    {"waiter", T_OBJECT, offsetof(Channel, waiter), 0, NULL},
    {"on_gone", T_OBJECT, offsetof(Channel, on_gone), 0, NULL},
    {"capacity", T_LONGLONG, offsetof(Channel, capacity), 0, NULL},
    {"sent", T_LONGLONG, offsetof(Channel, sent), 0, NULL},
    {"taken", T_LONGLONG, offsetof(Channel, taken), 0, NULL},
    {"freed", T_LONGLONG, offsetof(Channel, freed), 0, NULL},
    {"limit", T_LONGLONG, offsetof(Channel, limit), 0, NULL},
    {"received", T_LONGLONG, offsetof(Channel, received), 0, NULL},
    {"merged", T_LONGLONG, offsetof(Channel, merged), 0, NULL},
    {"folding", T_BOOL, offsetof(Channel, folding), 0, NULL},
    {"gone", T_BOOL, offsetof(Channel, gone), 0, NULL},
    {"ended", T_BOOL, offsetof(Channel, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Channel *self = (Channel *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->fresh = PyList_New(0);
    self->folded = Py_NewRef(Py_None);
    self->waiter = Py_NewRef(Py_None);
    self->on_gone = Py_NewRef(Py_None);
    if (self->fresh == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int channel_traverse(PyObject *object, visitproc visit, void *arg)
{
    Channel *self = (Channel *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->fresh);
    Py_VISIT(self->folded);
    Py_VISIT(self->waiter);
    Py_VISIT(self->on_gone);
    return 0;
}

/* Only what can lead back here; `fresh` holds items, which cannot, and is relied upon to be there. */
static int channel_clear(PyObject *object)
{
    Channel *self = (Channel *)object;
    Py_CLEAR(self->waiter);
    Py_CLEAR(self->on_gone);
    return 0;
}

static void channel_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    channel_clear(object);
    Py_CLEAR(((Channel *)object)->fresh);
    Py_CLEAR(((Channel *)object)->folded);
    drop(object);
}

/* How many events without columns lie at the front of what waits: those that are one by joining text and ids. */
static Py_ssize_t plain_events(const Channel *self)
{
    Py_ssize_t n = 0, waiting = PyList_Size(self->fresh);
    for (; n < waiting; n++) {
        PyObject *item = PyList_GetItem(self->fresh, n);
        if (Py_TYPE(item) != (PyTypeObject *)event_type || ((Event *)item)->columns != Py_None) break;
    }
    return n;
}

/* An event that has nothing yet. ChunkEvent is a class of Python's, and so its objects are the collector's: up to 3.11
 * making one may collect, which runs whatever a finalizer does, here and in other threads. */
static Event *blank_event(void)
{
    return (Event *)PyType_GenericAlloc((PyTypeObject *)event_type, 0);
}

/* Fill a blank event with the first `count` of the items, which are plain events, joined. Nothing in here can run
 * Python: the items stay where they are. */
static int fill_joined(Event *sum, PyObject *items, Py_ssize_t count)
{
    Event *first = (Event *)PyList_GetItem(items, 0), *last = (Event *)PyList_GetItem(items, count - 1);
    Py_ssize_t text_size = 0, ids_size = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Event *event = (Event *)PyList_GetItem(items, i);
        text_size += PyBytes_Size(event->text_utf8);
        ids_size += PyBytes_Size(event->ids_raw);
    }
    sum->text_utf8 = PyBytes_FromStringAndSize(NULL, text_size);
    sum->ids_raw = PyBytes_FromStringAndSize(NULL, ids_size);
    if (sum->text_utf8 == NULL || sum->ids_raw == NULL) return -1;
    char *text = PyBytes_AsString(sum->text_utf8), *ids = PyBytes_AsString(sum->ids_raw);
    for (Py_ssize_t i = 0; i < count; i++) {
        Event *event = (Event *)PyList_GetItem(items, i);
        Py_ssize_t text_part = PyBytes_Size(event->text_utf8), ids_part = PyBytes_Size(event->ids_raw);
        memcpy(text, PyBytes_AsString(event->text_utf8), (size_t)text_part);
        memcpy(ids, PyBytes_AsString(event->ids_raw), (size_t)ids_part);
        text += text_part, ids += ids_part;
        sum->generated += event->generated;
    }
    sum->first = first->first;
    sum->prompt_tokens = last->prompt_tokens;
    sum->stamp_ns = last->stamp_ns;
    sum->finish = Py_NewRef(last->finish);
    sum->columns = Py_NewRef(Py_None);
    sum->size = text_size + ids_size;
    return 0;
}

/* How many of the items that wait are taken as one event. 0: none waits. -1: it is not so simple. */
static Py_ssize_t quick_count(const Channel *self)
{
    if (self->folding || (self->folded != NULL && self->folded != Py_None)) return -1;
    Py_ssize_t waiting = PyList_Size(self->fresh);
    if (waiting == 0) return 0;
    if (waiting == 1) /* alone, it may have columns */
        return Py_TYPE(PyList_GetItem(self->fresh, 0)) == (PyTypeObject *)event_type ? 1 : -1;
    Py_ssize_t plain = plain_events(self);
    int more = plain < waiting && Py_TYPE(PyList_GetItem(self->fresh, plain)) == (PyTypeObject *)event_type;
    return plain == 0 || more ? -1 : plain;
}

/* The first `count` of what waits, as one (new). NULL with an exception, or without: fewer are there, counted by
 * `still`, than were before it was made. */
static Event *joined(const Channel *self, Py_ssize_t count, Py_ssize_t (*still)(const Channel *))
{
    if (count == 1) return (Event *)Py_NewRef(PyList_GetItem(self->fresh, 0));
    Event *sum = blank_event();
    if (sum == NULL) return NULL;
    if (still(self) < count || fill_joined(sum, self->fresh, count) != 0) {
        Py_DECREF((PyObject *)sum);
        return NULL;
    }
    return sum;
}

/* take_quick(): the usual cases of taking: one event, or several without columns, as one item. None: nothing waits,
 * or the source was closed (which leaves there what a sender was about to send). False: not usual, use take(). */
static PyObject *channel_take_quick(PyObject *object, PyObject *unused)
{
    (void)unused;
    Channel *self = (Channel *)object;
    if (self->gone) Py_RETURN_NONE;
    Py_ssize_t count = quick_count(self);
    if (count == 0) Py_RETURN_NONE;
    if (count < 0) Py_RETURN_FALSE;
    Event *event = joined(self, count, quick_count);
    if (event == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    PyObject *first = Py_NewRef(PyList_GetItem(self->fresh, 0)); /* held: nothing else can come to lie where it does */
    PyObject *wrapped =
        PyObject_CallFunctionObjArgs(event->finish == Py_None ? frame_type : done_type, (PyObject *)event, NULL);
    long long size = event->size;
    Py_DECREF((PyObject *)event); /* `wrapped` has it */
    /* The call above may have let another thread in: take them only if they are still there, still first. */
    int there = !self->folding && PyList_Size(self->fresh) >= count && PyList_GetItem(self->fresh, 0) == first;
    Py_DECREF(first);
    if (wrapped == NULL) return NULL;
    if (!there) {
        Py_DECREF(wrapped);
        Py_RETURN_FALSE;
    }
    self->taken += size;
    self->limit = self->gone ? -1 : self->capacity + self->taken + self->freed;
    self->received++;
    self->merged += count - 1;
    if (PyList_SetSlice(self->fresh, 0, count, NULL) != 0) {
        Py_DECREF(wrapped);
        return NULL;
    }
    return wrapped;
}

/* pop_plain(): take all events without columns off the front of what waits, as one, and count them as merged;
 * None when there is none. With the lock held. */
static PyObject *channel_pop_plain(PyObject *object, PyObject *unused)
{
    (void)unused;
    Channel *self = (Channel *)object;
    Py_ssize_t count = plain_events(self);
    if (count == 0) Py_RETURN_NONE;
    Event *event = joined(self, count, plain_events); /* with the lock there can only be more by then */
    if (event == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (PyList_SetSlice(self->fresh, 0, count, NULL) != 0) {
        Py_DECREF((PyObject *)event);
        return NULL;
    }
    self->merged += count - 1;
    return (PyObject *)event;
}

static PyMethodDef channel_methods[] = {
    {"take_quick", channel_take_quick, METH_NOARGS, "Take the events that wait as one; None: none does; False: use take()."},
    {"pop_plain", channel_pop_plain, METH_NOARGS, "Take the events at the front off as one; None: there is none."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot channel_slots[] = {
    {Py_tp_new, channel_new},           {Py_tp_dealloc, channel_dealloc}, {Py_tp_traverse, channel_traverse},
    {Py_tp_clear, channel_clear},       {Py_tp_members, channel_members}, {Py_tp_methods, channel_methods},
    {Py_tp_doc, "Channel's fields."}, {0, NULL}};
static PyType_Spec channel_spec = {"outfeed.sink._deliver.ChannelFields", sizeof(Channel), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, channel_slots};

/* ── Live: a request in the reader's table ────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    PyObject *channel; /* a Channel, set once */
    PyObject *ids;     /* bytearray */
    unsigned long long next;
    long long columns_bytes; /* of what was sent, the part that is neither text nor ids */
} Live;

static PyMemberDef live_members[] = {{"channel", T_OBJECT_EX, offsetof(Live, channel), READONLY, NULL},
                                     {"ids", T_OBJECT_EX, offsetof(Live, ids), READONLY, NULL},
                                     {"next", T_ULONGLONG, offsetof(Live, next), 0, NULL},
                                     {"columns_bytes", T_LONGLONG, offsetof(Live, columns_bytes), 0, NULL},
                                     {NULL, 0, 0, 0, NULL}};

static int live_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"channel", NULL};
    Live *self = (Live *)object;
    PyObject *channel;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Live", names, channel_base, &channel)) return -1;
    if (self->channel != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Live keeps the channel it was made with");
        return -1;
    }
    self->ids = PyByteArray_FromStringAndSize(NULL, 0);
    if (self->ids == NULL) return -1;
    self->channel = Py_NewRef(channel);
    return 0;
}

static int live_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Live *)object)->channel);
    return 0;
}

static void live_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((Live *)object)->channel);
    Py_CLEAR(((Live *)object)->ids);
    drop(object);
}

/* No tp_clear: every cycle through a Live goes through its channel's on_gone or the table, which are cleared. */
static PyType_Slot live_slots[] = {{Py_tp_init, live_init},         {Py_tp_dealloc, live_dealloc},
                                   {Py_tp_traverse, live_traverse}, {Py_tp_members, live_members},
                                   {Py_tp_doc, "Live's fields."},   {0, NULL}};
static PyType_Spec live_spec = {"outfeed.sink._deliver.LiveFields", sizeof(Live), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, live_slots};

#endif
