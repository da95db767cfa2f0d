#ifndef OUTFEED_RING_VIEW_H
#define OUTFEED_RING_VIEW_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

/* The memory that views look into. */
typedef struct {
    PyObject *object; /* what keeps it mapped: a read-only memoryview, which is never released by hand */
    const char *bytes;
    uint64_t size;
} mapping;

/* Take `object`, a read-only memoryview; -1 with an exception. */
int mapping_take(mapping *memory, PyObject *object);

/* A View of [start, end) of it; NULL with an exception. */
PyObject *view_of(const mapping *memory, uint64_t start, uint64_t end);

/* Add the type to the module; -1 with an exception. */
int view_add_type(PyObject *module);

#endif
