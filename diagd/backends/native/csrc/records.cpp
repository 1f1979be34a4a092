#include "records.h"

// The records of this library, for Python to compare.
extern "C" const char* records() {
  static const std::string lines = describe<Layer>() + describe<Model>() + describe<Step>() +
                                   describe<Draw>() + describe<Drawing>() + describe<Space>() +
                                   describe<Attended>();
  return lines.c_str();
}
