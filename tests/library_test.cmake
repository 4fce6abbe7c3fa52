# Installs the component `library` into an empty prefix, compiles every installed header by itself,
# builds the examples against the prefix alone and runs them.
#   cmake -DBUILD=<build folder> -DSOURCE=<source folder> -DCXX=<compiler> -P library_test.cmake
set(work ${BUILD}/library_test)
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix} --component library)

file(GLOB_RECURSE headers RELATIVE ${prefix}/include ${prefix}/include/sortie/*.h)
list(LENGTH headers count)
if(count LESS 20)
  message(FATAL_ERROR "only ${count} headers were installed")
endif()
foreach(header ${headers})
  string(MAKE_C_IDENTIFIER ${header} name)
  file(WRITE ${work}/headers/${name}.cc "#include \"${header}\"\n")
endforeach()
file(GLOB sources ${work}/headers/*.cc)
run(${CXX} -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-missing-field-initializers
    -I${prefix}/include ${sources})

run(${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${work}/examples -DCMAKE_PREFIX_PATH=${prefix}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=-Wall\ -Wextra\ -Werror)
run(${CMAKE_COMMAND} --build ${work}/examples)
run(${work}/examples/w4a8_grouped_gemm)
run(${work}/examples/moe_two_ranks)
