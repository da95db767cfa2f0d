/* The calls made once per frame, once per batch of frames or once per turn, as methods: outfeed.ring._fast.
 *
 * cffi carries the rest of the C core well, but takes about 300 ns to turn one Python buffer into a pointer,
 * and a decode step is ten of them. This file knows Python and nothing of the ring: it gets the core's
 * functions by address (they stay in _core, so there is one copy of the core in a process), gathers
 * buffers, and builds frames (a body: view.c). Errors are told by the Python subclass's _refuse().
 *
 * The GIL: a write that may wait or copies more than COPY_WITHOUT_GIL gives it up; a wait gives it up unless
 * there is something to read already; a read copies nothing and keeps it. */

#include "view.h"

#include <stddef.h>

#include "../api.h"
#include "../clock.h"

#define COPY_WITHOUT_GIL 65536
#define FEW_PARTS 16
#define MOST_WAITED_ON 256

typedef int (*write_call)(lane_writer *, int, const part *, uint32_t, int64_t);
typedef int (*read_call)(lane_reader *, uint32_t, const uint64_t *, const frames *);
typedef int (*reader_call)(lane_reader *);
typedef int (*wait_call)(bell *, lane_reader *const *, uint32_t, int64_t);

/* ── Writer ─────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    write_call write;
    lane_writer *handle;
    PyObject *kept; /* what `handle` is freed with */
} Writer;

/* The buffers of one call; `held` counts those that must be released. */
typedef struct {
    part *parts;
    Py_buffer *buffers;
    Py_ssize_t held;
    uint64_t size;
} gathered;

static int gather_one(gathered *g, Py_ssize_t i, PyObject *object) {
    part *p = &g->parts[i];
    if (PyBytes_CheckExact(object)) {
        p->bytes = PyBytes_AsString(object);
        p->length = (uint64_t)PyBytes_Size(object);
    } else {
        Py_buffer *b = &g->buffers[g->held];
        if (PyObject_GetBuffer(object, b, PyBUF_SIMPLE) != 0) {
            if (PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
            PyErr_Format(PyExc_ValueError, "part %zd (%R) is not a C-contiguous buffer", i,
                         (PyObject *)Py_TYPE(object));
            return -1;
        }
        g->held++;
        p->bytes = b->buf;
        p->length = (uint64_t)b->len;
    }
    g->size += p->length;
    return 0;
}

/* A waiting write, taken up again after each signal whose handler raised nothing; -100 when one did. */
enum { RAISED = -100 };

static int write_waiting(Writer *self, int tag, const gathered *g, Py_ssize_t count, int64_t timeout) {
    int64_t deadline = now_ns() + timeout;
    for (;;) {
        int code;
        Py_BEGIN_ALLOW_THREADS;
        code = self->write(self->handle, tag, g->parts, (uint32_t)count, timeout);
        Py_END_ALLOW_THREADS;
        if (code != RING_INTERRUPTED) return code;
        if (PyErr_CheckSignals() != 0) return RAISED;
        timeout = deadline - now_ns();
        if (timeout < 0) timeout = 0;
    }
}

static int parse_timeout(PyObject *const *kwargs, PyObject *kwnames, double *timeout) {
    *timeout = 0.0;
    Py_ssize_t n = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i);
        if (PyUnicode_CompareWithASCIIString(name, "timeout") != 0) {
            PyErr_Format(PyExc_TypeError, "write() takes no keyword %R, only timeout", name);
            return -1;
        }
        *timeout = PyFloat_AsDouble(kwargs[i]);
        if (*timeout == -1.0 && PyErr_Occurred()) return -1;
        if (!(*timeout >= 0.0 && *timeout <= RING_LONGEST_TIMEOUT_S)) {
            PyErr_Format(PyExc_ValueError, "timeout %R: expected 0 to %d seconds", kwargs[i],
                         RING_LONGEST_TIMEOUT_S);
            return -1;
        }
    }
    return 0;
}

static int parse_tag(PyObject *object, int *tag) {
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) return -1;
    *tag = value < 0 || value > 255 ? -1 : (int)value; /* the core refuses -1 */
    return 0;
}

static int call_write(Writer *self, int tag, gathered *g, PyObject *const *objects, Py_ssize_t count,
                      double timeout) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (gather_one(g, i, objects[i]) != 0) return RAISED;
    if (g->size <= COPY_WITHOUT_GIL) { /* nearly always there is room, and the GIL stays here */
        int code = self->write(self->handle, tag, g->parts, (uint32_t)count, timeout == 0.0 ? 0 : -1);
        if (code != RING_FULL || timeout == 0.0) return code;
    }
    return write_waiting(self, tag, g, count, (int64_t)(timeout * 1e9));
}

static int write_gathered(Writer *self, int tag, gathered *g, PyObject *const *objects, Py_ssize_t count,
                          double timeout) {
    int code = call_write(self, tag, g, objects, count, timeout);
    for (Py_ssize_t i = 0; i < g->held; i++) PyBuffer_Release(&g->buffers[i]);
    return code;
}

static int write_many(Writer *self, int tag, gathered *g, PyObject *const *objects, Py_ssize_t count,
                      double timeout) {
    if (count > RING_MAX_PARTS) {
        PyErr_Format(PyExc_ValueError, "%zd parts: a frame is gathered from at most %d; join some", count,
                     RING_MAX_PARTS);
        return RAISED;
    }
    g->parts = PyMem_Malloc((size_t)count * sizeof(part));
    g->buffers = PyMem_Malloc((size_t)count * sizeof(Py_buffer));
    int code = RAISED;
    if (g->parts == NULL || g->buffers == NULL)
        PyErr_NoMemory();
    else
        code = write_gathered(self, tag, g, objects, count, timeout);
    PyMem_Free(g->parts);
    PyMem_Free(g->buffers);
    return code;
}

static PyObject *Writer_write(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    Writer *self = (Writer *)object;
    part parts[FEW_PARTS];
    Py_buffer buffers[FEW_PARTS];
    gathered g = {.parts = parts, .buffers = buffers};
    double timeout;
    int tag, code;
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "write() needs a tag");
        return NULL;
    }
    if (parse_tag(args[0], &tag) != 0 || parse_timeout(args + nargs, kwnames, &timeout) != 0) return NULL;
    if (self->handle == NULL)
        code = RING_CLOSED;
    else if (nargs - 1 <= FEW_PARTS)
        code = write_gathered(self, tag, &g, args + 1, nargs - 1, timeout);
    else
        code = write_many(self, tag, &g, args + 1, nargs - 1, timeout);
    if (code == RING_OK) Py_RETURN_NONE;
    if (code == RAISED) return NULL;
    return PyObject_CallMethod(object, "_refuse", "iOKd", code, args[0], (unsigned long long)g.size, timeout);
}

static PyObject *Writer_bind(PyObject *object, PyObject *args) {
    Writer *self = (Writer *)object;
    unsigned long long call, handle;
    PyObject *kept;
    if (!PyArg_ParseTuple(args, "KKO", &call, &handle, &kept)) return NULL;
    if (self->kept != NULL) {
        PyErr_SetString(PyExc_ValueError, "_bind: once");
        return NULL;
    }
    Py_INCREF(kept);
    self->kept = kept;
    self->write = (write_call)(uintptr_t)call;
    self->handle = (lane_writer *)(uintptr_t)handle;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(write_doc,
"write($self, tag, /, *parts, timeout=0.0)\n--\n\n"
"Write one frame whose body is `parts` end to end, in one C call, without joining them here.\n\n"
"`tag` is 0-255; each part is a C-contiguous buffer (bytes, bytearray, memoryview, numpy array), at most\n"
"256 of them. With `timeout` 0 a full lane is RingFull at once; else the call waits, parked, up to so many\n"
"seconds (at most 3600). Nothing is visible to any consumer unless the whole frame is.\n\n"
"Raises FrameTooLarge, RingFull, CorruptLane, RingClosed, WriterBusy (a second thread, or a reservation is\n"
"open), ValueError.");

static PyMethodDef writer_methods[] = {
    {"write", (PyCFunction)(void (*)(void))Writer_write, METH_FASTCALL | METH_KEYWORDS, write_doc},
    {"_bind", Writer_bind, METH_VARARGS, "_bind(write, handle, kept): addresses of writer_write and of its handle; what keeps that alive."},
    {NULL, NULL, 0, NULL},
};

/* ── Reader ─────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    read_call read;
    reader_call unread, release, pending;
    wait_call wait;
    lane_reader *handle;
    bell *bell;
    mapping segment;
    PyObject *kept; /* what `handle` and `bell` are freed with */
    Py_ssize_t lanes;
    frames out;
    void *room; /* the columns of `out` */
    int building; /* frames are being made of `out`: a finalizer, or a thread that runs meanwhile, may come here again */
} Reader;

static PyObject *frame_of(const Reader *self, Py_ssize_t i) {
    PyObject *frame = PyTuple_New(3), *lane = PyLong_FromLong((long)self->out.lane[i]);
    PyObject *tag = PyLong_FromLong((long)self->out.tag[i]);
    PyObject *body = view_of(&self->segment, self->out.start[i], self->out.end[i]);
    if (!frame || !lane || !tag || !body) {
        Py_XDECREF(frame);
        Py_XDECREF(lane);
        Py_XDECREF(tag);
        Py_XDECREF(body);
        return NULL;
    }
    PyTuple_SetItem(frame, 0, lane);
    PyTuple_SetItem(frame, 1, tag);
    PyTuple_SetItem(frame, 2, body);
    return frame;
}

static PyObject *frames_of(const Reader *self, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *frame = frame_of(self, i);
        if (frame == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SetItem(list, i, frame);
    }
    return list;
}

static int parse_upto(const Reader *self, PyObject *object, uint64_t *upto) {
    Py_ssize_t n = PySequence_Size(object);
    if (n < 0) return -1;
    if (n != self->lanes) {
        PyErr_Format(PyExc_ValueError, "upto has %zd positions; this ring has %zd lanes", n, self->lanes);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        upto[i] = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Raise what a read came to. A fault is told once: without memory to say it (CPython 3.11 makes a SystemError of
 * that where it finds none for the call itself), by the next read. */
static PyObject *refuse_read(Reader *self, int code) {
    PyObject *none = PyObject_CallMethod((PyObject *)self, "_refuse", "i", code);
    int untold = PyErr_ExceptionMatches(PyExc_MemoryError) || PyErr_ExceptionMatches(PyExc_SystemError);
    if (code == RING_CORRUPT && untold) self->unread(self->handle);
    return none;
}

static PyObject *Reader_read(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", "upto", NULL};
    Reader *self = (Reader *)object;
    uint64_t positions[RING_MAX_LANES], *upto = NULL;
    Py_ssize_t limit = 256;
    PyObject *given = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|nO:read", names, &limit, &given)) return NULL;
    if (limit < 1 || limit > RING_MAX_BATCH)
        return PyErr_Format(PyExc_ValueError, "limit %zd: expected 1 to %d frames", limit, RING_MAX_BATCH);
    int code = RING_CLOSED;
    if (self->handle != NULL) {
        if (given != Py_None && parse_upto(self, given, upto = positions) != 0) return NULL;
        code = self->building ? RING_BUSY : self->read(self->handle, (uint32_t)limit, upto, &self->out);
    }
    if (code < 0) return refuse_read(self, code);
    self->building = 1;
    PyObject *found = frames_of(self, code);
    if (found == NULL) self->unread(self->handle); /* no memory: a release must not give back what nobody saw */
    self->building = 0;
    return found;
}

static PyObject *Reader_release(PyObject *object, PyObject *unused) {
    (void)unused;
    Reader *self = (Reader *)object;
    int code = self->building ? RING_BUSY : self->handle ? self->release(self->handle) : RING_CLOSED;
    if (code != RING_OK) return PyObject_CallMethod(object, "_refuse", "i", code);
    Py_RETURN_NONE;
}

static PyObject *Reader_pending(PyObject *object, PyObject *unused) {
    (void)unused;
    Reader *self = (Reader *)object;
    int code = self->handle ? self->pending(self->handle) : RING_CLOSED;
    if (code < 0) return PyObject_CallMethod(object, "_refuse", "i", code);
    return PyBool_FromLong(code);
}

/* Collect the handles of a wait; all must be readers with this one's doorbell. `consumers` is a tuple of the
 * call's own, which keeps them: the caller's list can be changed by another thread while this one sleeps. */
static int waiting_on(Reader *self, PyObject *consumers, lane_reader **handles, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(consumers, i);
        if (item == NULL) return -1;
        Reader *other = (Reader *)item;
        int same_type = Py_TYPE(item) == Py_TYPE((PyObject *)self);
        int same_bell = same_type && other->bell == self->bell;
        handles[i] = same_bell ? other->handle : NULL;
        if (!same_type) {
            PyErr_Format(PyExc_TypeError, "wait: item %zd is no Consumer", i);
            return -1;
        }
        if (!same_bell) {
            PyErr_SetString(PyExc_ValueError, "wait: the consumers have different doorbells; give all rings of "
                                              "a thread the same one");
            return -1;
        }
    }
    return 0;
}

/* Something to read already: no need to give the GIL up, and to wait for it afterwards. */
static int any_pending(const Reader *self, lane_reader *const *handles, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (self->pending(handles[i]) == 1) return 1;
    return 0;
}

/* Wait, taken up again after each signal whose handler raised nothing. */
static int wait_for(Reader *self, lane_reader *const *handles, Py_ssize_t count, int64_t timeout) {
    if (any_pending(self, handles, count)) return 1;
    int64_t deadline = now_ns() + timeout;
    for (;;) {
        int code;
        Py_BEGIN_ALLOW_THREADS;
        code = self->wait(self->bell, handles, (uint32_t)count, timeout);
        Py_END_ALLOW_THREADS;
        if (code != RING_INTERRUPTED) return code;
        if (PyErr_CheckSignals() != 0) return RAISED;
        timeout = deadline - now_ns();
        if (timeout < 0) timeout = 0;
    }
}

static PyObject *wait_on_all(Reader *self, PyObject *consumers, double timeout) {
    lane_reader *handles[MOST_WAITED_ON];
    Py_ssize_t count = PyTuple_Size(consumers);
    if (count < 1 || count > MOST_WAITED_ON)
        return PyErr_Format(PyExc_ValueError, "wait: %zd consumers; expected 1 to %d", count, MOST_WAITED_ON);
    if (self->handle == NULL) return PyObject_CallMethod((PyObject *)self, "_refuse", "i", RING_CLOSED);
    if (waiting_on(self, consumers, handles, count) != 0) return NULL;
    int code = wait_for(self, handles, count, (int64_t)((timeout < 1.0 ? timeout : 1.0) * 1e9));
    if (code == RAISED) return NULL;
    if (code < 0) return PyObject_CallMethod((PyObject *)self, "_refuse", "i", code);
    return PyBool_FromLong(code);
}

static PyObject *Reader_wait(PyObject *object, PyObject *args) {
    PyObject *consumers;
    double timeout;
    if (!PyArg_ParseTuple(args, "Od", &consumers, &timeout)) return NULL;
    if (!(timeout >= 0.0 && timeout <= RING_LONGEST_TIMEOUT_S))
        return PyErr_Format(PyExc_ValueError, "timeout: expected 0 to %d seconds", RING_LONGEST_TIMEOUT_S);
    PyObject *held = PySequence_Tuple(consumers);
    if (held == NULL) return NULL;
    PyObject *found = wait_on_all((Reader *)object, held, timeout);
    Py_DECREF(held);
    return found;
}

static PyObject *Reader_bind(PyObject *object, PyObject *args) {
    Reader *self = (Reader *)object;
    unsigned long long read, unread, release, pending, wait, handle, bell_at;
    PyObject *memory, *kept;
    Py_ssize_t lanes;
    if (!PyArg_ParseTuple(args, "(KKKKK)KKOOn", &read, &unread, &release, &pending, &wait, &handle, &bell_at, &kept,
                          &memory, &lanes))
        return NULL;
    if (lanes < 1 || lanes > RING_MAX_LANES || self->room != NULL) {
        PyErr_SetString(PyExc_ValueError, "_bind: once, with 1 to 256 lanes");
        return NULL;
    }
    if (self->segment.object == NULL && mapping_take(&self->segment, memory) != 0) return NULL;
    uint64_t *columns = PyMem_Malloc(RING_MAX_BATCH * 3 * sizeof(uint64_t));
    if (columns == NULL) return PyErr_NoMemory();
    self->room = columns;
    self->out.start = columns;
    self->out.end = columns + RING_MAX_BATCH;
    self->out.lane = (uint32_t *)(columns + 2 * RING_MAX_BATCH);
    self->out.tag = self->out.lane + RING_MAX_BATCH;
    self->read = (read_call)(uintptr_t)read;
    self->unread = (reader_call)(uintptr_t)unread;
    self->release = (reader_call)(uintptr_t)release;
    self->pending = (reader_call)(uintptr_t)pending;
    self->wait = (wait_call)(uintptr_t)wait;
    self->handle = (lane_reader *)(uintptr_t)handle;
    self->bell = (bell *)(uintptr_t)bell_at;
    self->lanes = lanes;
    Py_INCREF(kept);
    self->kept = kept;
    Py_RETURN_NONE;
}

static void Reader_dealloc(PyObject *object) {
    Reader *self = (Reader *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->segment.object);
    Py_XDECREF(self->kept);
    PyMem_Free(self->room);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(read_doc,
"read($self, /, limit=256, upto=None)\n--\n\n"
"Return up to `limit` (1-4096) unread frames as (lane, tag, body); [] when there is none.\n\n"
"Lanes take turns, a lane's frames come in order. Each body is a View of the lane, valid until the next\n"
"`release`; copy what must live longer. With `upto` (from `tails`), frames that start at or beyond a\n"
"lane's position there stay unread.\n\n"
"A corrupt lane costs itself alone: the frames read before the fault and those of other lanes are returned,\n"
"then one later call, before it reads anything, raises CorruptLane for it, once; from then on the lane is\n"
"skipped. After a MemoryError nothing was read or told: the next call finds it again.");

PyDoc_STRVAR(release_doc,
"release($self, /)\n--\n\n"
"Say that everything read so far is handled: its room goes back to the writers.\n\n"
"What is read and not released when this process dies is read again by the next one.");

static PyMethodDef reader_methods[] = {
    {"read", (PyCFunction)(void (*)(void))Reader_read, METH_VARARGS | METH_KEYWORDS, read_doc},
    {"release", Reader_release, METH_NOARGS, release_doc},
    {"pending", Reader_pending, METH_NOARGS,
     "pending($self, /)\n--\n\nWhether `read` would return or raise something now."},
    {"_wait", Reader_wait, METH_VARARGS, "_wait(consumers, timeout): see outfeed.ring.wait."},
    {"_bind", Reader_bind, METH_VARARGS,
     "_bind(calls, handle, bell, kept, memory, lanes): addresses of the core's functions and handles; what keeps\n"
     "those alive; the segment, a read-only memoryview."},
    {NULL, NULL, 0, NULL},
};

/* ── Module ─────────────────────────────────────────────────────────────────────────────────────── */

static void Writer_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((Writer *)object)->kept);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "The base of LaneWriter: write()."},
    {Py_tp_methods, writer_methods},
    {Py_tp_dealloc, Writer_dealloc},
    {0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "The base of Consumer: read()."},
    {Py_tp_methods, reader_methods},
    {Py_tp_dealloc, Reader_dealloc},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    "outfeed.ring._fast.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, writer_slots};
static PyType_Spec reader_spec = {
    "outfeed.ring._fast.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, reader_slots};

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return -1;
    int code = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return code;
}

static int fast_exec(PyObject *module) {
    return add_type(module, &writer_spec) || add_type(module, &reader_spec) || view_add_type(module) ? -1 : 0;
}

static PyModuleDef_Slot fast_slots[] = {{Py_mod_exec, fast_exec}, {0, NULL}};

static struct PyModuleDef fast_module = {
    PyModuleDef_HEAD_INIT, "_fast", "The per-frame calls of the ring.", 0, NULL, fast_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) { return PyModuleDef_Init(&fast_module); }
