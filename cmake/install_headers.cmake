# Run by `cmake --install`: the public headers, whose includes of each other get the prefix sortie/.
foreach(header ${sortie_headers})
  file(READ "${sortie_source}/${header}" text)
  string(REGEX REPLACE "#include \"([a-z_]+/)" "#include \"sortie/\\1" text "${text}")
  set(copy "${sortie_copies}/${header}")
  file(WRITE "${copy}" "${text}")
  cmake_path(GET header PARENT_PATH folder)
  file(INSTALL "${copy}" DESTINATION "${CMAKE_INSTALL_PREFIX}/${sortie_include}/${folder}")
endforeach()
