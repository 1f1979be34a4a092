// Records that Python reads and writes, too: structs that know their own text.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <string>

#define RECORD(name, ...) \
  struct name {           \
    __VA_ARGS__           \
  };                      \
  inline const char* text_of(const name*) { return #name "," #__VA_ARGS__; }

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

// What a record was compiled to, as a line: its size, where each field begins, and its text.
template <class T, class... Fields>
std::string describe() {
  if constexpr (requires { T{Fields{}..., Numbered{}}; }) {
    return describe<T, Fields..., Numbered>();
  } else {
    uint8_t bytes[sizeof(T)] = {}, number = 0;
    new (bytes) T{Fields{++number}...};
    std::string line = std::to_string(sizeof(T));
    for (int i = 1; i <= number; i++)
      line += "," + std::to_string((uint8_t*)std::memchr(bytes, i, sizeof(T)) - bytes);
    return line + "," + text_of((const T*)nullptr) + "\n";
  }
}
