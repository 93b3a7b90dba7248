// The instruction set that all machines have.
#define SGLEXT_ADD add_portable
#include "codes.inl"
