# The half that stands on libtorch: rooms comm to optim, and the Python extension modules.
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import os, importlib.util as u; print(os.path.dirname(u.find_spec('torch').origin))"
  OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(Torch REQUIRED PATHS ${torch_root}/share/cmake NO_DEFAULT_PATH)

file(GLOB engine_sources CONFIGURE_DEPENDS src/comm/*.cc src/nn/*.cc src/pipeline/*.cc src/optim/*.cc)
list(REMOVE_ITEM engine_sources ${concurrency_sources})
list(REMOVE_ITEM engine_sources ${arithmetic_sources})
add_library(shardsmith_engine STATIC ${engine_sources})
# torch's headers are not ours to warn about.
target_include_directories(shardsmith_engine SYSTEM PUBLIC ${TORCH_INCLUDE_DIRS})
target_link_libraries(shardsmith_engine PUBLIC shardsmith_core ${TORCH_LIBRARIES} PRIVATE shardsmith_warnings)
target_compile_definitions(shardsmith_engine PUBLIC USE_DISTRIBUTED USE_C10D)
# Loops with sqrt() or floor() become vectors only where nobody reads errno or the processor's exception flags; values are
# the same.
set(vector_options -fopenmp-simd -fno-math-errno -fno-trapping-math)
target_compile_options(shardsmith_engine PRIVATE ${vector_options})
target_precompile_headers(shardsmith_engine PRIVATE
  <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)

# Extension modules. pybind11 is the one inside torch, so that its types pass between our modules and torch's.
function(shardsmith_extension name)
  add_library(${name} MODULE ${ARGN})
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so" CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${name} SYSTEM PRIVATE ${TORCH_INCLUDE_DIRS} ${Python3_INCLUDE_DIRS})
  target_compile_definitions(${name} PRIVATE TORCH_EXTENSION_NAME=${name})
  target_link_libraries(${name} PRIVATE shardsmith_warnings)
endfunction()

file(GLOB core_module_sources CONFIGURE_DEPENDS python/csrc/core/*.cc)
shardsmith_extension(_core ${core_module_sources})
target_link_libraries(_core PRIVATE shardsmith_cli)

find_library(TORCH_PYTHON_LIBRARY torch_python PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
file(GLOB engine_module_sources CONFIGURE_DEPENDS python/csrc/engine/*.cc)
shardsmith_extension(_engine ${engine_module_sources})
target_link_libraries(_engine PRIVATE shardsmith_engine ${TORCH_PYTHON_LIBRARY})

add_executable(bench_step EXCLUDE_FROM_ALL bench/step.cc)
target_link_libraries(bench_step PRIVATE shardsmith_engine shardsmith_warnings)

if(SHARDSMITH_TESTS)
  file(GLOB engine_tests CONFIGURE_DEPENDS tests/engine/*.cc)
  if(engine_tests)
    add_executable(engine_test ${engine_tests})
    target_link_libraries(engine_test PRIVATE shardsmith_engine shardsmith_warnings GTest::gtest GTest::gmock GTest::gtest_main)
    target_precompile_headers(engine_test REUSE_FROM shardsmith_engine)
    # The library's precompiled header was made with -fPIC, where an executable would take -fPIE.
    set_target_properties(engine_test PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(engine_test PRIVATE ${vector_options} -fPIC)
    add_test(NAME engine COMMAND engine_test)
    add_test(NAME engine_campaigns COMMAND engine_test --gtest_filter=*RoundTrips*)
    set_tests_properties(engine_campaigns PROPERTIES LABELS long ENVIRONMENT SHARDSMITH_LONG=1)
  endif()
endif()
