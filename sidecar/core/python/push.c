/* The one call a scheduler makes per decode step, as a method: outfeed.sidecar._push.
 *
 * cffi takes about 300 ns to turn one Python buffer into a pointer, and a push has three or four. This file
 * knows Python and nothing of rings or tables: it gets the functions of both cores by address (so there is
 * one copy of each in a process), turns arrays into pointers, and has the step written where it is read:
 * into a reservation of the lane. Errors are told by the Python subclass's _refuse().
 *
 * The reservation comes first and is also what keeps a second thread out: it is refused while one is open.
 * The GIL: a push that has to wait, or whose body is above COPY_WITHOUT_GIL bytes, gives it up. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../../ring/core/api.h"
#include "../../../ring/core/clock.h"
#include "../api.h"

#define COPY_WITHOUT_GIL 65536
#define MAX_TOKENS (1 << 28)

/* Beside the codes of the ring and of api.h: nothing is refused yet, or an exception is set. */
enum { ANOTHER_TYPE = -40, RAISED = -43 };

typedef int (*reserve_call)(lane_writer *, uint64_t, int64_t, uint64_t *);
typedef int (*commit_call)(lane_writer *, int, uint64_t);
typedef int (*cancel_call)(lane_writer *);
typedef uint64_t (*size_call)(const outfeed_decode_step *);
typedef int64_t (*step_call)(outfeed_table *, const outfeed_decode_step *, uint8_t *);
typedef void (*retract_call)(outfeed_table *, const outfeed_decode_step *);

typedef struct {
    PyObject_HEAD
    reserve_call reserve;
    commit_call commit;
    cancel_call cancel;
    lane_writer *handle;
    size_call size;
    step_call step;
    retract_call retract;
    outfeed_table *table;
    Py_buffer memory; /* the segment the lane is in */
    int tag;
    int bound;
} Pusher;

/* ── Columns ────────────────────────────────────────────────────────────────────────────────────── */

/* A buffer format is one of native or little-endian integers of that sign; which one is told by its size. */
static int is_integer(const char *format, int is_signed) {
    if (format == NULL) return 0;
    if (*format == '<' || *format == '=' || *format == '@') format++;
    return format[0] != 0 && format[1] == 0 && strchr(is_signed ? "ilq" : "ILQ", format[0]) != NULL;
}

/* View `object` as a contiguous column of integers. 0, or ANOTHER_TYPE when it is none just so, or RAISED. */
static int view(PyObject *object, Py_buffer *buffer, Py_ssize_t width, int is_signed) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_ND | PyBUF_FORMAT) != 0) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError)) return RAISED;
        PyErr_Clear();
        return ANOTHER_TYPE;
    }
    if (buffer->ndim == 1 && buffer->itemsize == width && is_integer(buffer->format, is_signed)) return 0;
    PyBuffer_Release(buffer);
    return ANOTHER_TYPE;
}

/* ── The push ───────────────────────────────────────────────────────────────────────────────────── */

static int64_t write_step(Pusher *self, const outfeed_decode_step *step, uint64_t size, int64_t timeout) {
    uint64_t offset;
    int code = self->reserve(self->handle, size, timeout, &offset);
    if (code != RING_OK) return code;
    int64_t refused = self->step(self->table, step, (uint8_t *)self->memory.buf + offset);
    if (refused < 0) {
        self->cancel(self->handle);
        return refused;
    }
    code = self->commit(self->handle, self->tag, size);
    if (code != RING_OK) self->retract(self->table, step); /* the lane was closed meanwhile: nobody sees the step */
    return code;
}

/* Taken up again after each signal whose handler raised nothing. */
static int64_t write_waiting(Pusher *self, const outfeed_decode_step *step, uint64_t size, int64_t timeout) {
    int64_t deadline = now_ns() + timeout;
    for (;;) {
        int64_t code;
        Py_BEGIN_ALLOW_THREADS;
        code = write_step(self, step, size, timeout);
        Py_END_ALLOW_THREADS;
        if (code != RING_INTERRUPTED) return code;
        if (PyErr_CheckSignals() != 0) return RAISED;
        timeout = deadline - now_ns();
        if (timeout < 0) timeout = 0;
    }
}

static int64_t push_columns(Pusher *self, outfeed_decode_step *step, const Py_buffer *routes, const Py_buffer *counts,
                            const Py_buffer *ids, double timeout, uint64_t *size) {
    Py_ssize_t rows = routes->len / 8, tokens = ids->len / 4;
    if (rows < 1 || rows > OUTFEED_MAX_ROWS) return OUTFEED_ROWS;
    if (counts != NULL && counts->len / 4 != rows) return OUTFEED_COUNTS;
    if (tokens > MAX_TOKENS) return OUTFEED_TOKENS;
    step->routes = routes->buf;
    step->counts = counts ? counts->buf : NULL;
    step->ids = ids->buf;
    step->rows = (uint32_t)rows;
    step->tokens = (uint32_t)tokens;
    *size = self->size(step);
    if (*size <= COPY_WITHOUT_GIL) { /* nearly always there is room, and the GIL stays here */
        int64_t code = write_step(self, step, *size, timeout == 0.0 ? 0 : -1);
        if (code != RING_FULL || timeout == 0.0) return code;
    }
    return write_waiting(self, step, *size, (int64_t)(timeout * 1e9));
}

static int64_t push_objects(Pusher *self, outfeed_decode_step *step, PyObject *const *args, double timeout, uint64_t *size) {
    Py_buffer routes, ids, counts;
    int64_t code = view(args[0], &routes, 8, 0);
    if (code != 0) return code;
    if ((code = view(args[1], &ids, 4, 1)) == 0) {
        if (args[2] == Py_None) {
            code = push_columns(self, step, &routes, NULL, &ids, timeout, size);
        } else if ((code = view(args[2], &counts, 4, 0)) == 0) {
            code = push_columns(self, step, &routes, &counts, &ids, timeout, size);
            PyBuffer_Release(&counts);
        }
        PyBuffer_Release(&ids);
    }
    PyBuffer_Release(&routes);
    return code;
}

/* The step's parts that come as bytes. -1: an exception. */
static int take_bytes(outfeed_decode_step *step, PyObject *const *args, Py_ssize_t nargs) {
    int more = nargs == 7;
    if ((nargs != 5 && !more) || !PyBytes_Check(args[3]) || (more && !(PyBytes_Check(args[5]) && PyBytes_Check(args[6])))) {
        PyErr_SetString(PyExc_TypeError, "push(routes, ids, counts, endings: bytes, timeout[, families: bytes, "
                                         "optional: bytes]) takes just these");
        return -1;
    }
    Py_ssize_t endings = PyBytes_Size(args[3]), families = more ? PyBytes_Size(args[5]) : 1;
    if (endings > RING_MAX_CAPACITY || families > RING_MAX_CAPACITY) { /* so that the header's length fits 32 bits */
        PyErr_Format(PyExc_ValueError, "the finish reasons or families take %zd bytes: no lane has room for them",
                     endings > families ? endings : families);
        return -1;
    }
    step->endings = (const uint8_t *)PyBytes_AsString(args[3]);
    step->endings_len = (uint32_t)endings;
    step->families = more ? (const uint8_t *)PyBytes_AsString(args[5]) : (const uint8_t *)"\x90"; /* none: [] */
    step->families_len = (uint32_t)families;
    step->optional = more ? (const uint8_t *)PyBytes_AsString(args[6]) : NULL;
    step->optional_len = more ? (uint64_t)PyBytes_Size(args[6]) : 0;
    return 0;
}

static PyObject *Pusher_push(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Pusher *self = (Pusher *)object;
    outfeed_decode_step step = {.stamp_ns = (uint64_t)now_ns()};
    if (take_bytes(&step, args, nargs) != 0) return NULL;
    double timeout = PyFloat_AsDouble(args[4]);
    if (timeout == -1.0 && PyErr_Occurred()) return NULL;
    if (!(timeout >= 0.0 && timeout <= RING_LONGEST_TIMEOUT_S))
        return PyErr_Format(PyExc_ValueError, "timeout %R: expected 0 to %d seconds", args[4],
                            RING_LONGEST_TIMEOUT_S);
    if (!self->bound) return PyErr_Format(PyExc_RuntimeError, "push: not bound to a lane");
    uint64_t size = 0;
    PyObject *stamp = PyLong_FromUnsignedLongLong(step.stamp_ns); /* before the push: a step that is out did not fail */
    if (stamp == NULL) return NULL;
    int64_t code = push_objects(self, &step, args, timeout, &size);
    if (code == RING_OK) return stamp;
    Py_DECREF(stamp);
    if (code == ANOTHER_TYPE) return PyLong_FromLong(0);
    if (code == RAISED) return NULL;
    return PyObject_CallMethod(object, "_refuse", "LKOOOd", (long long)code, (unsigned long long)size, args[0], args[1],
                               args[2], timeout);
}

static PyObject *Pusher_bind(PyObject *object, PyObject *args) {
    Pusher *self = (Pusher *)object;
    unsigned long long reserve, commit, cancel, handle, size, step, retract, table;
    PyObject *memory;
    int tag;
    if (!PyArg_ParseTuple(args, "i(KKKKO)(KKKK)", &tag, &handle, &reserve, &commit, &cancel, &memory, &size, &step,
                          &retract, &table))
        return NULL;
    if (self->bound) return PyErr_Format(PyExc_RuntimeError, "_bind: once");
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) != 0) return NULL;
    self->reserve = (reserve_call)(uintptr_t)reserve;
    self->commit = (commit_call)(uintptr_t)commit;
    self->cancel = (cancel_call)(uintptr_t)cancel;
    self->handle = (lane_writer *)(uintptr_t)handle;
    self->size = (size_call)(uintptr_t)size;
    self->step = (step_call)(uintptr_t)step;
    self->retract = (retract_call)(uintptr_t)retract;
    self->table = (outfeed_table *)(uintptr_t)table;
    self->tag = tag;
    self->bound = 1;
    Py_RETURN_NONE;
}

static void Pusher_dealloc(PyObject *object) {
    Pusher *self = (Pusher *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->bound) PyBuffer_Release(&self->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ── Module ─────────────────────────────────────────────────────────────────────────────────────── */

PyDoc_STRVAR(push_doc,
"push($self, routes, ids, counts, endings, timeout, families=b'\\x90', optional=b'', /)\n--\n\n"
"Write one decode step as one frame; return its stamp, CLOCK_MONOTONIC ns.\n\n"
"routes u64[rows], ids i32[tokens], counts u32[rows] or None for one each: contiguous buffers of just these\n"
"types, else 0 is returned and nothing was done. endings: the msgpack array of [row, finish reason] pairs.\n"
"families, optional: the msgpack array of the optional families' sizes, and their columns end to end; both or none.\n"
"timeout: seconds to wait for room. A refusal is what _refuse(code, size, routes, ids, counts, timeout) raises.");

static PyMethodDef methods[] = {
    {"push", (PyCFunction)(void (*)(void))Pusher_push, METH_FASTCALL, push_doc},
    {"_bind", Pusher_bind, METH_VARARGS,
     "_bind(tag, (handle, reserve, commit, cancel, memory), (step size, step, step retract, table)): addresses in both\n"
     "cores."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The base of StepWriter: push()."},
    {Py_tp_methods, methods},
    {Py_tp_dealloc, Pusher_dealloc},
    {0, NULL},
};

static PyType_Spec spec = {
    "outfeed.sidecar._push.Pusher", sizeof(Pusher), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

static int push_exec(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL) return -1;
    int code = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return code;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, push_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_push", "The per-step call of a scheduler's port.", 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__push(void) { return PyModuleDef_Init(&module); }
