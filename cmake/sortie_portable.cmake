# SORTIE_PORTABLE: the rooms that need no foreign library's binary, for processors that Debian's
# cross compilers know but have no libraries for here. fmt, spdlog and nlohmann-json are used as
# headers, which are the same for all processors; GoogleTest is built from Debian's sources.
find_package(Threads REQUIRED)

# A folder of their own: all of /usr/include would hide the other processor's C headers.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/headers)
foreach(library fmt spdlog nlohmann)
  file(CREATE_LINK /usr/include/${library} ${CMAKE_BINARY_DIR}/headers/${library} SYMBOLIC)
endforeach()
foreach(target fmt::fmt spdlog::spdlog nlohmann_json::nlohmann_json)
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/headers)
endforeach()
target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
target_compile_definitions(spdlog::spdlog INTERFACE FMT_HEADER_ONLY SPDLOG_FMT_EXTERNAL)

if(SORTIE_TESTS)
  enable_testing()
  set(googletest /usr/src/googletest/googletest)
  add_library(gtest STATIC ${googletest}/src/gtest-all.cc)
  target_include_directories(gtest SYSTEM PUBLIC ${googletest}/include PRIVATE ${googletest})
  target_link_libraries(gtest PUBLIC Threads::Threads)
  add_library(gtest_main STATIC ${googletest}/src/gtest_main.cc)
  target_link_libraries(gtest_main PUBLIC gtest)
  add_library(GTest::gtest ALIAS gtest)
  add_library(GTest::gtest_main ALIAS gtest_main)
endif()
