#include <nanobind/nanobind.h>

NB_MODULE(_transfer, m) { m.doc() = ""; }
