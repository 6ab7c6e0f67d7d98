// Marks a library with the variant and the sources that it was compiled from; `compiler.py` defines the mark and reads it.
//
// This file is compiled, linked and loaded first: where that fails, compiling the others would be in vain.

extern "C" const char radixkv_stamp[] = RADIXKV_STAMP;
