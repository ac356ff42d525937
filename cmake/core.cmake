# The torch-free half: rooms base to cli.
file(GLOB core_sources CONFIGURE_DEPENDS
  src/base/*.cc src/layout/*.cc src/storage/*.cc src/format/*.cc src/family/*.cc src/checkpoint/*.cc)
# What threads do with each other in the other half needs no torch either: here the thread sanitizer sees every line.
set(concurrency_sources
  ${CMAKE_CURRENT_SOURCE_DIR}/src/comm/rendezvous.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/pipeline/schedule.cc)
list(APPEND core_sources ${concurrency_sources})
# Plain arithmetic that both halves use.
set(arithmetic_sources ${CMAKE_CURRENT_SOURCE_DIR}/src/optim/buckets.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/optim/loss_scale.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/optim/schedule.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/pipeline/activation_memory.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/pipeline/training_memory.cc)
list(APPEND core_sources ${arithmetic_sources})
add_library(shardsmith_core STATIC ${core_sources})
target_include_directories(shardsmith_core PUBLIC src include)
target_include_directories(shardsmith_core SYSTEM PRIVATE ${ISAL_INCLUDE})
target_link_libraries(shardsmith_core PRIVATE shardsmith_warnings ${ISAL_LIBRARY} ZLIB::ZLIB nlohmann_json::nlohmann_json PUBLIC Threads::Threads)
if(SHARDSMITH_SANITIZE)
  list(JOIN SHARDSMITH_SANITIZE "," sanitizers)
  target_compile_options(shardsmith_core PUBLIC -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  # Our own assertions and those of the standard library too.
  target_compile_options(shardsmith_core PUBLIC -UNDEBUG)
  target_compile_definitions(shardsmith_core PUBLIC _GLIBCXX_ASSERTIONS)
  target_link_options(shardsmith_core PUBLIC -fsanitize=${sanitizers})
endif()

# The verbs, for the program and for their tests.
file(GLOB cli_sources CONFIGURE_DEPENDS src/cli/*.cc)
list(REMOVE_ITEM cli_sources ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/main.cc)
add_library(shardsmith_cli STATIC ${cli_sources})
target_link_libraries(shardsmith_cli PUBLIC shardsmith_core PRIVATE shardsmith_warnings CLI11::CLI11 ZLIB::ZLIB)
target_compile_definitions(shardsmith_cli PUBLIC SHARDSMITH_VERSION="${PROJECT_VERSION}")
add_executable(shardsmith src/cli/main.cc)
target_link_libraries(shardsmith PRIVATE shardsmith_cli shardsmith_warnings)

if(SHARDSMITH_TESTS)
  enable_testing()
  file(GLOB core_tests CONFIGURE_DEPENDS tests/core/*.cc)
  if(core_tests)
    # The fuzz targets go along, for the replay of their corpus (hostile_test.cc).
    file(GLOB fuzz_targets CONFIGURE_DEPENDS fuzz/targets/*.cc)
    add_executable(core_test ${core_tests} ${fuzz_targets} fuzz/support.cc)
    target_include_directories(core_test PRIVATE fuzz)
    target_compile_definitions(core_test PRIVATE SHARDSMITH_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}")
    target_link_libraries(core_test PRIVATE shardsmith_cli shardsmith_warnings GTest::gtest GTest::gmock GTest::gtest_main ZLIB::ZLIB)
    add_test(NAME core COMMAND core_test)
    # Every point of the campaigns of which the usual run takes a sample.
    add_test(NAME core_campaigns COMMAND core_test "--gtest_filter=*Kill*:Retention.*:FullDisk*")
    set_tests_properties(core_campaigns PROPERTIES LABELS long ENVIRONMENT SHARDSMITH_LONG=1)
  endif()
  # The door through which tests/python/test_formats.py reaches the formats.
  add_executable(format_tool tests/core/tools/format_tool.cc)
  target_link_libraries(format_tool PRIVATE shardsmith_core shardsmith_warnings)
  # Makes checkpoints for the Python tests of the command line.
  add_executable(make_partial tests/cli/make_partial.cc)
  target_link_libraries(make_partial PRIVATE shardsmith_core shardsmith_warnings)
endif()

if(SHARDSMITH_TESTS)
  add_executable(bench_plan EXCLUDE_FROM_ALL bench/plan.cc)
  target_link_libraries(bench_plan PRIVATE shardsmith_core shardsmith_warnings)
endif()
