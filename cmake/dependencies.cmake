# Everything comes from Debian packages (requirements/debian.txt names them, scripts/setup installs them).
# Where the three header-and-source libraries have no package, FetchContent gets them: that needs the network.
include(FetchContent)
set(FETCHCONTENT_QUIET OFF)

# Like system headers: their warnings are not ours.
macro(shardsmith_fetch name url)
  message(STATUS "${name}: no installed package, fetching ${url}")
  FetchContent_Declare(${name} URL ${url} SYSTEM)
  FetchContent_MakeAvailable(${name})
endmacro()

find_package(Threads REQUIRED)
find_package(ZLIB REQUIRED)

find_path(ISAL_INCLUDE isa-l.h)
find_library(ISAL_LIBRARY isal)
if(NOT ISAL_INCLUDE OR NOT ISAL_LIBRARY)
  message(FATAL_ERROR "ISA-L is missing (Debian: libisal-dev)")
endif()

find_package(nlohmann_json 3.11 QUIET)
if(NOT nlohmann_json_FOUND)
  shardsmith_fetch(nlohmann_json https://github.com/nlohmann/json/releases/download/v3.11.2/json.tar.xz)
endif()

find_package(CLI11 2.1 QUIET)
if(NOT CLI11_FOUND)
  shardsmith_fetch(CLI11 https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.1.2.tar.gz)
endif()

if(SHARDSMITH_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    set(INSTALL_GTEST OFF)
    shardsmith_fetch(googletest https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz)
  endif()
endif()
