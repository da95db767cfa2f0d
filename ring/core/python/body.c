/* What every body is looked at for, in one call per frame: outfeed.ring._body.
 *
 * cffi gives the GIL up around every call. In a gateway its other thread takes it then, and the reader waits
 * to get it back, several times a frame: far longer than the looking takes. These calls keep it.
 *
 * probe() decides nothing: ring/checked.py compares what it finds, and says what is wrong. plain() lets the usual
 * body pass, in which nobody ends or asked for more than tokens; at few rows its checks in Python would be most of
 * what a step costs. What it does not let pass is checked there, and only there is said what is wrong. total() and
 * ascends() look at the columns of a family. */

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

static PyObject *check(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyBytes_Check(args[0])) return PyErr_Format(PyExc_TypeError, "check: expected bytes and a seed");
    uint64_t seed = PyLong_AsUnsignedLongLong(args[1]);
    if (seed == UINT64_MAX && PyErr_Occurred()) return NULL;
    const uint8_t *raw = (const uint8_t *)PyBytes_AsString(args[0]);
    return PyLong_FromUnsignedLongLong(outfeed_check_bytes(raw, (size_t)PyBytes_Size(args[0]), seed));
}

PyDoc_STRVAR(check_doc, "check(raw, seed, /)\n--\n\nReturn the check over bytes, as core/check.h says.");

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

/* A column of `count` u32; NULL with an exception when it does not lie in the body. */
static const uint8_t *column_of(PyObject *raw, Py_ssize_t at, Py_ssize_t count) {
    Py_ssize_t size = PyBytes_Size(raw);
    if (at >= 0 && at <= size && count >= 0 && count <= (size - at) / 4)
        return (const uint8_t *)PyBytes_AsString(raw) + at;
    PyErr_SetString(PyExc_ValueError, "the column does not lie in the body");
    return NULL;
}

static PyObject *total(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *raw;
    Py_ssize_t at, count;
    if (!PyArg_ParseTuple(args, "Snn:total", &raw, &at, &count)) return NULL;
    const uint8_t *column = column_of(raw, at, count);
    return column == NULL ? NULL : PyLong_FromUnsignedLongLong(sum_of(column, count));
}

PyDoc_STRVAR(total_doc,
"total(raw, at, count, /)\n--\n\n"
"Return the sum of `count` u32 at `at`. Raises ValueError when they do not lie in the body.");

static PyObject *ascends(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *raw;
    Py_ssize_t at, count, limit, last = -1, row = 0;
    if (!PyArg_ParseTuple(args, "Snnn:ascends", &raw, &at, &count, &limit)) return NULL;
    const uint8_t *column = column_of(raw, at, count);
    if (column == NULL) return NULL;
    for (; row < count && u32_at(column, row) > last && u32_at(column, row) < limit; row++) last = u32_at(column, row);
    return PyBool_FromLong(row == count);
}

PyDoc_STRVAR(ascends_doc,
"ascends(raw, at, count, limit, /)\n--\n\n"
"Return whether each of `count` u32 at `at` is above the one before it and below `limit`. Raises as `total`.");

/* ── The usual body ───────────────────────────────────────────────────────────────────────────────── */

#define MAX_ROWS (1u << 20)         /* ring/checked.py's */
#define MAX_COUNT UINT64_C(0x7fffffff) /* ring/families.py's */

typedef struct {
    const uint8_t *at, *end;
} packed;

/* Take one byte of the header if it is just this one. */
static int take(packed *p, uint8_t byte) {
    if (p->at == p->end || *p->at != byte) return 0;
    p->at++;
    return 1;
}

/* Take an msgpack unsigned number of any width. */
static int take_number(packed *p, uint64_t *value) {
    if (p->at == p->end) return 0;
    uint8_t kind = *p->at++;
    *value = kind;
    if (kind < 0x80) return 1;
    if (kind < 0xcc || kind > 0xcf) return 0;
    int bytes = 1 << (kind - 0xcc);
    if (p->end - p->at < bytes) return 0;
    *value = 0;
    while (bytes-- > 0) *value = *value << 8 | *p->at++;
    return 1;
}

typedef struct {
    uint64_t stamp_ns, rows, tokens, text_bytes;
    int egress;
    size_t data, text_at; /* where the core columns begin, and the text's */
} usual;

/* [version, stamp, rows, tokens, nobody ends, text_bytes or nil, no families, no token texts]. */
static int take_header(packed p, usual *u) {
    uint64_t version;
    if (!take(&p, 0x98) || !take_number(&p, &version) || version != BATCH_VERSION) return 0;
    if (!take_number(&p, &u->stamp_ns) || !take_number(&p, &u->rows) || !take_number(&p, &u->tokens)) return 0;
    if (!take(&p, 0x90)) return 0;
    u->egress = !take(&p, 0xc0);
    u->text_bytes = 0;
    if (u->egress && !take_number(&p, &u->text_bytes)) return 0;
    return take(&p, 0x90) && take(&p, 0xc0) && p.at == p.end && u->rows <= MAX_ROWS && u->tokens <= MAX_COUNT &&
           u->text_bytes <= MAX_COUNT;
}

/* The header's numbers fit each other and the body to the byte. No sum here can overflow. */
static int take_layout(const uint8_t *body, size_t size, const batch_prefix *prefix, usual *u) {
    if (prefix->body_len != size || prefix->header_len > size - BATCH_PREFIX) return 0;
    const uint8_t *header = body + BATCH_PREFIX;
    u->data = BATCH_PREFIX + batch_padded_header(prefix->header_len);
    if (!take_header((packed){header, header + prefix->header_len}, u)) return 0;
    u->text_at = u->data + BATCH_ROW * u->rows + BATCH_ID * u->tokens;
    size_t text = u->egress ? BATCH_EGRESS_ROW * u->rows + ((u->text_bytes + 3) & ~UINT64_C(3)) : 0;
    return u->text_at + text == size;
}

static int is_utf8(const uint8_t *text, size_t size) {
    size_t at = 0;
    uint64_t word = 0;
    for (; size - at >= 8 && (word & UINT64_C(0x8080808080808080)) == 0; at += 8) memcpy(&word, text + at, 8);
    uint8_t last = 0;
    for (; at < size; at++) last |= text[at];
    if (((word & UINT64_C(0x8080808080808080)) | (last & 0x80)) == 0) return 1;
    PyObject *made = PyUnicode_DecodeUTF8((const char *)text, (Py_ssize_t)size, NULL);
    if (made == NULL) PyErr_Clear();
    Py_XDECREF(made);
    return made != NULL;
}

static int is_sound(const uint8_t *body, size_t size, const batch_prefix *prefix, const usual *u) {
    Py_ssize_t rows = (Py_ssize_t)u->rows;
    if (sum_of(body + u->data + BATCH_COUNTS * u->rows, rows) != u->tokens) return 0;
    if (batch_check(body, size, prefix->header_len) != prefix->check) return 0;
    if (!u->egress) return 1;
    const uint8_t *lens = body + u->text_at + BATCH_TEXT_LENS * u->rows;
    const uint8_t *text = body + u->text_at + BATCH_EGRESS_ROW * u->rows;
    return sum_of(lens, rows) == u->text_bytes && is_utf8(text, u->text_bytes) &&
           inside_character(text, (Py_ssize_t)u->text_bytes, lens, rows) < 0;
}

static PyObject *plain(PyObject *module, PyObject *raw) {
    (void)module;
    usual u;
    batch_prefix prefix;
    if (!PyBytes_Check(raw)) return PyErr_Format(PyExc_TypeError, "plain: expected bytes");
    const uint8_t *body = (const uint8_t *)PyBytes_AsString(raw);
    size_t size = (size_t)PyBytes_Size(raw);
    if (size < BATCH_PREFIX) Py_RETURN_NONE;
    memcpy(&prefix, body, sizeof prefix);
    if (!take_layout(body, size, &prefix, &u) || !is_sound(body, size, &prefix, &u)) Py_RETURN_NONE;
    Py_ssize_t text_bytes = u.egress ? (Py_ssize_t)u.text_bytes : -1;
    return Py_BuildValue("nKnnn", (Py_ssize_t)u.data, (unsigned long long)u.stamp_ns, (Py_ssize_t)u.rows,
                         (Py_ssize_t)u.tokens, text_bytes);
}

PyDoc_STRVAR(plain_doc,
"plain(raw, /)\n--\n\n"
"Return (data, stamp_ns, rows, tokens, text_bytes) of a body without finish reasons, families and token texts\n"
"that passes every check; None of any other.\n\n"
"`data` is where the core columns begin; text_bytes is -1 in the step form.");

/* ── Steps joined ─────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject *raw;
    Py_ssize_t data, rows, tokens;
} joined_step;

static PyObject *name_raw, *name_data, *name_rows, *name_tokens;

static int number_of(PyObject *step, PyObject *name, Py_ssize_t *number) {
    PyObject *found = PyObject_GetAttr(step, name);
    *number = found == NULL ? -1 : PyLong_AsSsize_t(found);
    Py_XDECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Look at one Checked; what is found is held until the copy is made. */
static int find_step(PyObject *step, joined_step *found) {
    found->raw = PyObject_GetAttr(step, name_raw);
    if (found->raw == NULL || number_of(step, name_data, &found->data) != 0 ||
        number_of(step, name_rows, &found->rows) != 0 || number_of(step, name_tokens, &found->tokens) != 0)
        return -1;
    if (PyBytes_Check(found->raw) && fits(PyBytes_Size(found->raw), found->rows, found->data, -1, 0) &&
        found->tokens >= 0 &&
        found->tokens <= (PyBytes_Size(found->raw) - found->data - BATCH_ROW * found->rows) / BATCH_ID)
        return 0;
    PyErr_SetString(PyExc_ValueError, "join: the columns do not lie in the body");
    return -1;
}

/* Copy a column of every step: it begins at `at` bytes a row and has `width` bytes an element. */
static uint8_t *copy_column(uint8_t *to, const joined_step *steps, Py_ssize_t count, Py_ssize_t at, Py_ssize_t width,
                            int per_token) {
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t bytes = (size_t)(width * (per_token ? steps[i].tokens : steps[i].rows));
        memcpy(to, PyBytes_AsString(steps[i].raw) + steps[i].data + at * steps[i].rows, bytes);
        to += bytes;
    }
    return to;
}

static PyObject *copy_steps(const joined_step *steps, Py_ssize_t count) {
    Py_ssize_t rows = 0, tokens = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        rows += steps[i].rows;
        tokens += steps[i].tokens;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, BATCH_ROW * rows + BATCH_ID * tokens);
    if (made == NULL) return NULL;
    uint8_t *to = (uint8_t *)PyBytes_AsString(made);
    to = copy_column(to, steps, count, 0, BATCH_FIRST, 0);
    for (Py_ssize_t at = BATCH_FIRST; at < BATCH_ROW; at += 4) to = copy_column(to, steps, count, at, 4, 0);
    copy_column(to, steps, count, BATCH_ROW, BATCH_ID, 1);
    return made;
}

static PyObject *join(PyObject *module, PyObject *list) {
    (void)module;
    Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : -1, held = 0;
    if (count < 0) return PyErr_Format(PyExc_TypeError, "join: expected a list of checked bodies");
    joined_step *steps = PyMem_Calloc((size_t)count + 1, sizeof *steps);
    if (steps == NULL) return PyErr_NoMemory();
    int failed = 0;
    while (held < count && !failed) {
        PyObject *step = Py_XNewRef(PyList_GetItem(list, held)); /* NULL: its attributes' code made the list shorter */
        failed = step == NULL ? -1 : find_step(step, &steps[held++]);
        Py_XDECREF(step);
    }
    PyObject *made = failed ? NULL : copy_steps(steps, count);
    while (held > 0) Py_XDECREF(steps[--held].raw);
    PyMem_Free(steps);
    return made;
}

PyDoc_STRVAR(join_doc,
"join(steps, /)\n--\n\n"
"Return the core columns of a list of Checked, each column of one behind the other's, as one body has them.\n\n"
"Raises ValueError when one's columns do not lie in its body.");

static PyMethodDef body_methods[] = {
    {"ascends", ascends, METH_VARARGS, ascends_doc},
    {"check", (PyCFunction)(void (*)(void))check, METH_FASTCALL, check_doc},
    {"join", join, METH_O, join_doc},
    {"plain", plain, METH_O, plain_doc},
    {"probe", probe, METH_VARARGS, probe_doc},
    {"total", total, METH_VARARGS, total_doc},
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
    name_raw = PyUnicode_InternFromString("raw");
    name_data = PyUnicode_InternFromString("data");
    name_rows = PyUnicode_InternFromString("rows");
    name_tokens = PyUnicode_InternFromString("tokens");
    return name_raw && name_data && name_rows && name_tokens ? 0 : -1;
}

static PyModuleDef_Slot body_slots[] = {{Py_mod_exec, body_exec}, {0, NULL}};

static struct PyModuleDef body_module = {
    PyModuleDef_HEAD_INIT, "_body", "What every element of a body is looked at for.", 0, body_methods, body_slots,
    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__body(void) { return PyModuleDef_Init(&body_module); }
