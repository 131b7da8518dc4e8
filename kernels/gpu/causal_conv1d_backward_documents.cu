// causal_conv1d_backward.cu where samples hold several documents.
#define DOCUMENTS 1
#include "causal_conv1d_backward.cu"
