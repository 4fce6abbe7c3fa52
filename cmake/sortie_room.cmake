# sortie_room(NAME base SOURCES a.cc ... LINK sortie_x ... [TESTS a_test.cc ...] [TEST_LINK sortie_y ...])
# One static library a room and one test program over its x_test.cc files.

add_library(sortie_flags INTERFACE)
target_include_directories(sortie_flags INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>
                           $<INSTALL_INTERFACE:include>)
target_compile_features(sortie_flags INTERFACE cxx_std_20)
# No fast-math and no contraction the source did not ask for: bits are part of the contract.
# nvcc hands the same to its host compiler and is told for its own part not to contract.
set(sortie_warnings -Wall -Wextra -Wno-missing-field-initializers -ffp-contract=off -fno-math-errno)
string(REPLACE ";" "," sortie_cuda_warnings "${sortie_warnings}")
set(sortie_options
  "$<$<COMPILE_LANGUAGE:CXX>:${sortie_warnings}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${sortie_cuda_warnings};--fmad=false;--expt-relaxed-constexpr>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 sees overlap in plain string additions (its bug 105651).
  list(APPEND sortie_options $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(SORTIE_WERROR)
  list(APPEND sortie_options $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror;-Werror=all-warnings>")
endif()
# Who links the installed library gets the one option that the bits of its inline functions need.
target_compile_options(sortie_flags INTERFACE "$<BUILD_INTERFACE:${sortie_options}>"
                       $<INSTALL_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>>)
if(SORTIE_SANITIZE STREQUAL "address")
  target_compile_options(sortie_flags INTERFACE -fsanitize=address,undefined
                         -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(sortie_flags INTERFACE -fsanitize=address,undefined)
elseif(SORTIE_SANITIZE STREQUAL "thread")
  target_compile_options(sortie_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer -Wno-tsan)
  target_link_options(sortie_flags INTERFACE -fsanitize=thread)
endif()
if(SORTIE_FUZZ)
  target_compile_options(sortie_flags INTERFACE -fsanitize=fuzzer-no-link)  # coverage to steer by
endif()

function(sortie_room)
  cmake_parse_arguments(ROOM "" "NAME" "SOURCES;LINK;TESTS;TEST_LINK" ${ARGN})
  set(library sortie_${ROOM_NAME})
  add_library(${library} STATIC ${ROOM_SOURCES})
  target_link_libraries(${library} PUBLIC sortie_flags ${ROOM_LINK})
  if(SORTIE_TESTS AND ROOM_TESTS)
    set(test ${ROOM_NAME}_test)
    add_executable(${test} ${ROOM_TESTS})
    target_link_libraries(${test} PRIVATE ${library} ${ROOM_TEST_LINK} GTest::gtest GTest::gtest_main)
    target_compile_definitions(${test} PRIVATE SORTIE_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    if(SORTIE_PCH)
      target_precompile_headers(${test} PRIVATE <gtest/gtest.h>)
    endif()
    add_test(NAME ${ROOM_NAME} COMMAND ${test})
    if(SORTIE_SANITIZE STREQUAL "thread")
      # UCX hooks madvise when it is loaded, and a thread's end then crashes inside TSan.
      set_tests_properties(${ROOM_NAME} PROPERTIES ENVIRONMENT UCX_MEM_EVENTS=n)
    endif()
  endif()
endfunction()
