// The bindings of HIP only look whether this is here.
