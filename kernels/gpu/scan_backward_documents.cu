// scan_backward.cu where samples hold several documents.
#define DOCUMENTS 1
#include "scan_backward.cu"
