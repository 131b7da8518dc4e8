// scan_any.cu where samples hold several documents.
#define DOCUMENTS 1
#include "scan_any.cu"
