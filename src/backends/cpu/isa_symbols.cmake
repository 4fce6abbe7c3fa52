# Fails if an object file with AVX2, AVX-512 or AMX code defines a weak symbol: an inline function
# or template that the linker might keep for files meant for any processor.
execute_process(COMMAND ${NM} -A -C --defined-only ${ARCHIVE} OUTPUT_VARIABLE symbols
                RESULT_VARIABLE rc)
if(NOT rc EQUAL 0 OR NOT symbols MATCHES "kAvx512Kernels")
  message(FATAL_ERROR "${NM} found no object of such a set in ${ARCHIVE}")
endif()
string(REGEX MATCHALL "[^\n]*(avx|amx)[a-z0-9_]*\\.cc\\.o:[0-9a-f]* [WVu] [^D\n][^\n]*" weak "${symbols}")
# DW.ref.* are unoptimised builds' references to the exception runtime: data, no code.
if(weak)
  message(FATAL_ERROR "weak symbols in objects of instruction sets: ${weak}")
endif()
