// The decoder of a VQModel: from a code for each token to pixels. Products are of whole numbers of
// 12 bits, which moves a level by 2 of 255 at most (84 frames of doom).
//
// An image is rows of channels with an empty border around it, so a convolution of 3 x 3 is nine
// products of its rows, each with those that stand one further, and no case at the edges.
#pragma once
#include <vector>

#include "../integers.h"
#include "../team.h"
#include "records.h"

enum OpKind { CONVOLVE, SHORTCUT, ACTIVATE, ADD, ENLARGE };

class Painter {
 public:
  // An image of zeros.
  struct Image {
    int height = 0, width = 0, channels = 0, stride = 0;
    std::vector<float> numbers;
    Image() = default;
    Image(int height, int width, int channels)
        : height(height),
          width(width),
          channels(channels),
          stride(ceil_to(channels, BLOCK)),
          numbers((size_t)(height + 2) * (width + 2) * stride) {}
    float* at(int row, int column) {
      return numbers.data() + ((ptrdiff_t)(row + 1) * (width + 2) + column + 1) * stride;
    }
  };

  Image run(Image x, const Op* ops, int count) {
    Image kept;
    for (const Op* op = ops; op < ops + count; op++) {
      if (op->kind == CONVOLVE) x = convolve(x, *op);
      if (op->kind == SHORTCUT) kept = op->weight ? convolve(x, *op) : x;
      if (op->kind == ACTIVATE) activate(x, *op);
      if (op->kind == ADD)
        for (size_t i = 0; i < x.numbers.size(); i++) x.numbers[i] += kept.numbers[i];
      if (op->kind == ENLARGE) x = enlarge(x);
    }
    return x;
  }

 private:
  static Image convolve(Image& x, const Op& op) {
    Image to(x.height, x.width, op.output);
    const int blocks = to.stride / BLOCK, half = op.size / 2;
    const ptrdiff_t matrix = (ptrdiff_t)x.stride / 2 * to.stride;
    team.run(team.threads, [&](int thread, int threads, Barrier&) {
      for (int row = x.height * thread / threads; row < x.height * (thread + 1) / threads; row++)
        for (int place = 0; place < op.size * op.size; place++) {
          const float* from = x.at(row + place / op.size - half, place % op.size - half);
          const Matrix<Duo> w{(const Duo*)op.weight + place * matrix, x.stride,
                              place ? nullptr : op.bias, op.scale};
          multiply(Input<Duo>(from, x.stride, x.width, x.stride), w, 0, blocks, to.at(row, 0),
                   to.stride, place > 0);
        }
    });
    return to;
  }

  // Silu of a norm over groups of channels.
  static void activate(Image& x, const Op& op) {
    const int size = x.channels / op.size;
    team.run(team.threads, [&](int thread, int threads, Barrier&) {
      const int end = op.size * (thread + 1) / threads;
      for (int group = op.size * thread / threads; group < end; group++) {
        double sum = 0, squares = 0;
        const auto each = [&](auto f) {
          for (int row = 0; row < x.height; row++)
            for (int column = 0; column < x.width; column++)
              for (int c = group * size; c < (group + 1) * size; c++) f(x.at(row, column)[c], c);
        };
        const double count = (double)x.height * x.width * size;
        each([&](float& one, int) { sum += one; });
        const double mean = sum / count;
        each([&](float& one, int) { squares += (one - mean) * (one - mean); });
        const float scale = 1 / std::sqrt(squares / count + op.eps);
        each([&](float& one, int c) {
          const float y = (one - (float)mean) * scale * ((const float*)op.weight)[c] + op.bias[c];
          one = y / (1 + std::exp(-y));
        });
      }
    });
  }

  static Image enlarge(Image& x) {
    Image to(2 * x.height, 2 * x.width, x.channels);
    for (int row = 0; row < to.height; row++)
      for (int column = 0; column < to.width; column++)
        std::memcpy(to.at(row, column), x.at(row / 2, column / 2), x.stride * sizeof(float));
    return to;
  }
};
