// causal_conv1d.cu where samples hold several documents.
#define DOCUMENTS 1
#include "causal_conv1d.cu"
