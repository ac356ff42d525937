# One libFuzzer program for each file of fuzz/targets, over the torch-free half with address and undefined-behaviour
# sanitizers. scripts/fuzz configures, builds and runs them.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "SHARDSMITH_FUZZ needs clang: -DCMAKE_CXX_COMPILER=clang++ (Debian: clang, libclang-rt-dev)")
endif()
set(SHARDSMITH_ENGINE OFF)
set(SHARDSMITH_TESTS OFF)
set(SHARDSMITH_SANITIZE address undefined fuzzer-no-link)
# Another compiler, other warnings: the usual build is where they count.
target_compile_options(shardsmith_warnings INTERFACE -Wno-error)
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -gline-tables-only")

include(cmake/dependencies.cmake)
include(cmake/core.cmake)

add_library(fuzz_support STATIC fuzz/support.cc fuzz/entry.cc)
target_include_directories(fuzz_support PUBLIC fuzz)
target_link_libraries(fuzz_support PUBLIC shardsmith_core PRIVATE shardsmith_warnings ZLIB::ZLIB)
file(GLOB fuzz_targets CONFIGURE_DEPENDS fuzz/targets/*.cc)
foreach(source ${fuzz_targets})
  cmake_path(GET source STEM name)
  add_executable(fuzz_${name} ${source})
  target_link_libraries(fuzz_${name} PRIVATE fuzz_support shardsmith_warnings ZLIB::ZLIB)
  if(name STREQUAL "resume")  # what a resume opens is put together by the verbs' half
    target_link_libraries(fuzz_${name} PRIVATE shardsmith_cli)
  endif()
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
endforeach()
