// Records that Python reads and writes, too: structs that know their own text.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>

#define RECORD(name, ...) \
  struct name {           \
    __VA_ARGS__           \
  };                      \
  inline const char* text_of(const name*) { return #name "," #__VA_ARGS__ "\n"; }

// Becomes a field of any kind, each of its bytes the field's number.
struct Numbered {
  uint8_t number = 0;
  template <class T>
  operator T() const {
    T field;
    std::memset((void*)&field, number, sizeof(T));
    return field;
  }
};

// Writes what a record was compiled to as a line, and returns its end: the size, where each field
// begins, and the text.
inline char* write(char* to, int number) {
  if (number >= 10) to = write(to, number / 10);
  *to = '0' + number % 10;
  return to + 1;
}
template <class T, class... Fields>
char* describe(char* to) {
  if constexpr (requires { T{Fields{}..., Numbered{}}; }) {
    return describe<T, Fields..., Numbered>(to);
  } else {
    uint8_t bytes[sizeof(T)] = {}, number = 0;
    new (bytes) T{Fields{++number}...};
    to = write(to, sizeof(T));
    for (int i = 1; i <= number; i++) {
      *to++ = ',';
      to = write(to, (uint8_t*)std::memchr(bytes, i, sizeof(T)) - bytes);
    }
    *to++ = ',';
    return std::strcpy(to, text_of((const T*)nullptr)) + std::strlen(text_of((const T*)nullptr));
  }
}
template <class... Records>
const char* describe_all() {
  static char lines[8192];
  char* to = lines;
  ((to = describe<Records>(to)), ...);
  return lines;
}
