# The lists of a folder's sources.bzl, which both builds read: Bazel loads the file, CMake looks
# for `NAME = [` ... `]` with one quoted file on each line.
function(jax_ep_read_sources name variable)
  set(file ${CMAKE_CURRENT_SOURCE_DIR}/sources.bzl)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  if(NOT text MATCHES "(^|\n)${name} = \\[\n([^]]*)\\]\n")
    message(FATAL_ERROR "${file}: found no list ${name} = [, one quoted file on each line, ]")
  endif()
  string(REGEX MATCHALL "\"[^\"]+\"" sources "${CMAKE_MATCH_2}")
  string(REPLACE "\"" "" sources "${sources}")
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
