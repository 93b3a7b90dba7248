// AVX2 and FMA: 8 lanes of float.
#define SGLEXT_ADD add_avx2
#include "codes.inl"
