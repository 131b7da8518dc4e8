// scan_forward.cu where samples hold several documents.
#define DOCUMENTS 1
#include "scan_forward.cu"
