/* A frame's body where it lies, as a Python object: outfeed.ring.View.
 *
 * A memoryview would do, and does everything that is not done here. But to make one takes longer than all the
 * rest of reading a small frame. */

#include "view.h"

typedef struct {
    PyObject_HEAD
    PyObject *mapped; /* mapping.object */
    const char *bytes;
    Py_ssize_t length;
} View;

static PyTypeObject *view_type; /* numpy, which outfeed needs, is once in a process too */

int mapping_take(mapping *memory, PyObject *object) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) != 0) return -1;
    memory->bytes = buffer.buf;
    memory->size = (uint64_t)buffer.len;
    PyBuffer_Release(&buffer); /* the memoryview itself holds on to it */
    Py_INCREF(object);
    memory->object = object;
    return 0;
}

PyObject *view_of(const mapping *memory, uint64_t start, uint64_t end) {
    if (start > end || end > memory->size) {
        PyErr_SetString(PyExc_SystemError, "a frame lies outside its segment: the core let it pass");
        return NULL;
    }
    View *view = PyObject_New(View, view_type);
    if (view == NULL) return NULL;
    Py_INCREF(memory->object);
    view->mapped = memory->object;
    view->bytes = memory->bytes + start;
    view->length = (Py_ssize_t)(end - start);
    return (PyObject *)view;
}

static void View_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_DECREF(((View *)object)->mapped);
    PyObject_Free(object);
    Py_DECREF(type);
}

static int View_buffer(PyObject *object, Py_buffer *buffer, int flags) {
    View *self = (View *)object;
    return PyBuffer_FillInfo(buffer, object, (void *)self->bytes, self->length, 1, flags);
}

static Py_ssize_t View_length(PyObject *object) { return ((View *)object)->length; }

static PyObject *View_item(PyObject *object, PyObject *key) {
    PyObject *all = PyMemoryView_FromObject(object);
    PyObject *found = all ? PyObject_GetItem(all, key) : NULL;
    Py_XDECREF(all);
    return found;
}

/* As a memoryview is compared: by bytes, with any buffer. */
static PyObject *View_compare(PyObject *object, PyObject *other, int how) {
    PyObject *all = PyMemoryView_FromObject(object);
    PyObject *found = all ? PyObject_RichCompare(all, other, how) : NULL;
    Py_XDECREF(all);
    return found;
}

static PyObject *View_repr(PyObject *object) {
    return PyUnicode_FromFormat("<View of %zd bytes>", View_length(object));
}

PyDoc_STRVAR(view_doc,
"A frame's body where it lies in its lane: read-only bytes, valid until the consumer's next `release`.\n\n"
"Anything that takes a buffer takes it: bytes(view), memoryview(view), numpy.frombuffer(view, dtype),\n"
"struct.unpack_from, another lane's `write`. len() is in bytes; items, slices and == are a memoryview's.");

static PyType_Slot view_slots[] = {
    {Py_tp_doc, (void *)view_doc},
    {Py_tp_dealloc, View_dealloc},
    {Py_tp_repr, View_repr},
    {Py_tp_richcompare, View_compare},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_bf_getbuffer, View_buffer},
    {Py_mp_length, View_length},
    {Py_mp_subscript, View_item},
    {0, NULL},
};

static PyType_Spec view_spec = {
    "outfeed.ring.View", sizeof(View), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_slots};

int view_add_type(PyObject *module) {
    if (view_type == NULL) view_type = (PyTypeObject *)PyType_FromSpec(&view_spec);
    return view_type == NULL ? -1 : PyModule_AddType(module, view_type);
}
