// Marks a library with the variant and the sources that it was compiled from. `compiler.py` defines and reads the mark.
//
// It is compiled, linked and loaded first: where that fails, compiling the other files would be in vain.
#if !defined(__GNUC__) || defined(__clang__)
#error "the kernels need GCC: torch's OpenMP is GCC's, which other compilers do not call"
#endif

extern "C" const char radixkv_stamp[] = RADIXKV_STAMP;

// Needs OpenMP when it is loaded, as the kernels do.
extern "C" int radixkv_num_threads() {
  int num_threads = 0;
#pragma omp parallel
  {
#pragma omp atomic
    num_threads++;
  }
  return num_threads;
}
