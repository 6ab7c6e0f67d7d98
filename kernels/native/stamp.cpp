// Marks a library with the variant and the sources that it was compiled from. `compiler.py` defines and reads the mark.
//
// This file is compiled, linked and loaded first, as a trial, before the time to compile the others is spent.

extern "C" const char radixkv_stamp[] = RADIXKV_STAMP;
