# The rooms that others may link, as the package `sortie` (docs/library.md). Two components: `library`
# (headers, static libraries, package files) and `command` (the program).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sortie)
set(library_rooms base quant ops reference cpu exchange)
set(library_targets sortie_flags)
set_target_properties(sortie_flags PROPERTIES EXPORT_NAME flags)
foreach(room ${library_rooms})
  set_target_properties(sortie_${room} PROPERTIES EXPORT_NAME ${room})
  list(APPEND library_targets sortie_${room})
endforeach()
install(TARGETS ${library_targets} EXPORT sortie COMPONENT library
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT sortie NAMESPACE sortie:: FILE sortie-targets.cmake DESTINATION ${package_dir}
        COMPONENT library)
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/sortie-config.cmake.in
                              ${CMAKE_BINARY_DIR}/sortie-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/sortie-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/sortie-config.cmake ${CMAKE_BINARY_DIR}/sortie-config-version.cmake
        DESTINATION ${package_dir} COMPONENT library)

# In the source a header of the project is "room/name.h"; where others have folders called base or
# ops too it is "sortie/room/name.h", so installing adds the word. The public headers include no
# others, which the test `library` checks by compiling each.
set(public_headers
    base/arena.h base/check.h base/clock.h base/exchange_layout.h base/scalar.h base/status.h
    base/tensor.h base/threads.h
    quant/activations.h quant/amax.h quant/fp8_block.h quant/matrix.h quant/matrix_ops.h
    quant/w4afp8.h quant/w8a8_int8.h
    ops/ops.h
    backends/reference/reference.h
    backends/cpu/isa.h backends/cpu/probe.h
    exchange/exchange.h exchange/local.h exchange/transport.h)
install(CODE "set(sortie_source ${CMAKE_SOURCE_DIR}/src)
              set(sortie_copies ${CMAKE_BINARY_DIR}/installed_headers)
              set(sortie_include ${CMAKE_INSTALL_INCLUDEDIR}/sortie)
              set(sortie_headers \"${public_headers}\")" COMPONENT library)
install(SCRIPT ${CMAKE_SOURCE_DIR}/cmake/install_headers.cmake COMPONENT library)

install(TARGETS sortie RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT command)
