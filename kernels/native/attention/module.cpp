#include <nanobind/nanobind.h>

NB_MODULE(_attention, m) { m.doc() = ""; }
