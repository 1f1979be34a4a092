#include "records.h"

// The records of this library, for Python to compare.
extern "C" const char* records() {
  return describe_all<Layer, Model, Step, Draw, Drawing, Space, Attended>();
}
