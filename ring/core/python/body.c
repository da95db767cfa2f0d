/* What is looked at in every element of a BATCH body, in one call per frame: outfeed.ring._body.
 *
 * cffi gives the GIL up around every call. In a gateway its other thread takes it then, and the reader waits
 * to get it back, several times a frame: far longer than the looking takes. This call keeps it. It decides
 * nothing: ring/checked.py compares what it finds, and says what is wrong. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "../batch.h"

static uint32_t u32_at(const uint8_t *column, Py_ssize_t row) {
    uint32_t value;
    memcpy(&value, column + 4 * row, sizeof value);
    return value;
}

/* At most 2^40 elements of 32 bits: cannot overflow. */
static uint64_t sum_of(const uint8_t *column, Py_ssize_t rows) {
    uint64_t sum = 0;
    for (Py_ssize_t row = 0; row < rows; row++) sum += u32_at(column, row);
    return sum;
}

/* Where the first row's part begins that begins inside a character; -1 when none does. */
static Py_ssize_t inside_character(const uint8_t *text, Py_ssize_t size, const uint8_t *lens, Py_ssize_t rows) {
    uint64_t at = 0;
    for (Py_ssize_t row = 0; row < rows && at < (uint64_t)size; row++) {
        if ((text[at] & 0xC0) == 0x80) return (Py_ssize_t)at;
        at += u32_at(lens, row);
    }
    return -1;
}

/* Whether the columns lie in the body, the core ones at `data` and, unless `text_at` is -1, the text's there. */
static int fits(Py_ssize_t size, Py_ssize_t rows, Py_ssize_t data, Py_ssize_t text_at, Py_ssize_t text_bytes) {
    if (rows < 0 || rows > PY_SSIZE_T_MAX / 64 || data < BATCH_PREFIX || data > size) return 0;
    if (BATCH_ROW * rows > size - data) return 0;
    if (text_at < 0) return text_at == -1;
    return text_at <= size && text_bytes >= 0 && BATCH_EGRESS_ROW * rows <= size - text_at &&
           text_bytes <= size - text_at - BATCH_EGRESS_ROW * rows;
}

static PyObject *probe(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *raw;
    unsigned int header_len;
    Py_ssize_t rows, data, text_at, text_bytes;
    if (!PyArg_ParseTuple(args, "SInnnn:probe", &raw, &header_len, &rows, &data, &text_at, &text_bytes)) return NULL;
    const uint8_t *body = (const uint8_t *)PyBytes_AsString(raw);
    Py_ssize_t size = PyBytes_Size(raw), inside = -1;
    if (!fits(size, rows, data, text_at, text_bytes)) {
        PyErr_SetString(PyExc_ValueError, "probe: the columns do not lie in the body");
        return NULL;
    }
    uint64_t counts = sum_of(body + data + BATCH_COUNTS * rows, rows), lens = 0;
    if (text_at >= 0) {
        const uint8_t *column = body + text_at + BATCH_TEXT_LENS * rows;
        const uint8_t *text = body + text_at + BATCH_EGRESS_ROW * rows;
        lens = sum_of(column, rows);
        inside = inside_character(text, text_bytes, column, rows);
    }
    uint64_t check = batch_check(body, (size_t)size, header_len);
    return Py_BuildValue("KKnK", (unsigned long long)counts, (unsigned long long)lens, inside,
                         (unsigned long long)check);
}

PyDoc_STRVAR(probe_doc,
"probe(raw, header_len, rows, data, text_at, text_bytes, /)\n--\n\n"
"Return (sum of counts, sum of text_lens, where a row's text begins inside a character or -1, the check).\n\n"
"`data` is where the core columns begin, `text_at` where the text's do (generated, text_lens, text), -1 in the\n"
"step form. Raises ValueError when they do not lie in the body.");

static PyMethodDef body_methods[] = {
    {"probe", probe, METH_VARARGS, probe_doc},
    {NULL, NULL, 0, NULL},
};

/* The layout's numbers, so that Python has them from batch.h and not by hand. */
static int body_exec(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
        {"VERSION", BATCH_VERSION},       {"PREFIX_BYTES", BATCH_PREFIX},
        {"FIRST_AT", BATCH_FIRST},        {"COUNTS_AT", BATCH_COUNTS},
        {"PROMPT_TOKENS_AT", BATCH_PROMPTS}, {"ROW_BYTES", BATCH_ROW},
        {"TEXT_LENS_AT", BATCH_TEXT_LENS}, {"EGRESS_ROW_BYTES", BATCH_EGRESS_ROW},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) != 0) return -1;
    return 0;
}

static PyModuleDef_Slot body_slots[] = {{Py_mod_exec, body_exec}, {0, NULL}};

static struct PyModuleDef body_module = {
    PyModuleDef_HEAD_INIT, "_body", "What every element of a body is looked at for.", 0, body_methods, body_slots,
    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__body(void) { return PyModuleDef_Init(&body_module); }
