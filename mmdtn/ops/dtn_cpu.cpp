// The forward and backward passes of DTN on CPUs, for float32 tokens with channels last. reference.py defines the
// results.
//
// The work is split into chunks. For one head of one image, a chunk holds LANES channels, as many as fit into a vector
// register. P never mixes chunks, so a single thread can process a chunk from pooling to output while its cells stay in
// the cache. Separate passes compute what depends on all channels of a token: its statistics before the chunks, and the
// rest of the gradient after them. Every sum has a fixed order, so the number of threads does not affect the results.
//
// The names follow docs/mathematics.md: z is a token divided by its root mean square, and M and V are the mean and the
// variance of its neighbourhood.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
// Loads and stores use this type. With memcpy, the compiler would assume that any memory may change.
typedef float InMemory __attribute__((vector_size(4 * LANES), aligned(4)));

// The arguments of a call, with the same fields as _Problem in dtn_cpu.py. Gradients are null in the forward pass.
struct Problem {
  int64_t images, height, width, channels, heads, side;
  double eps;
  int64_t prenorm, unbiased, pool_second_moment, identity;
  const float *x, *weight, *bias, *mean_lambda, *var_lambda, *position;
  float* of_tokens;    // planes of H x W for each image: 1 / RMS of each head, mean and variance
  float* of_channels;  // shift of each channel in each image, subtracted before computing variances
  float* y;
  const float* grad;
  float *grad_x, *grad_weight, *grad_bias, *grad_mean_lambda, *grad_var_lambda, *grad_position;
  float* shares;  // partial gradients of the token means and variances: two planes of H x W for each image and chunk
  float* scratch;  // planes of h x w x LANES for each thread: 4 in the forward pass, 8 in the backward pass
};

namespace {

inline Vec load(const float* p, int n = LANES) {
  if (n == LANES) return *reinterpret_cast<const InMemory*>(p);
  Vec v{};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}

inline void store(float* p, Vec v, int n = LANES) {
  if (n == LANES)
    *reinterpret_cast<InMemory*>(p) = v;
  else
    for (int i = 0; i < n; i++) p[i] = v[i];
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline Vec rsqrt(Vec v) {
  for (int i = 0; i < LANES; i++) v[i] = 1 / std::sqrt(v[i]);
  return v;
}

// Returns a[i] + a[i ^ step] in lane i, with b instead of a in lanes whose number has the bit of step.
template <int step, int... i>
inline Vec merge(Vec a, Vec b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (i & step ? LANES + i : i)...) +
         __builtin_shufflevector(a, b, ((i ^ step) + (i & step ? LANES : 0))...);
#else
  typedef int Lanes __attribute__((vector_size(4 * LANES)));
  return __builtin_shuffle(a, b, Lanes{(i & step ? LANES + i : i)...}) +
         __builtin_shuffle(a, b, Lanes{((i ^ step) + (i & step ? LANES : 0))...});
#endif
}

// Returns the sum over the lanes of v[i] in lane i, with a third of the work of separate sums. Overwrites v.
template <int step = 1>
inline Vec sums(Vec (&v)[LANES]) {
  for (int i = 0; i < LANES / step / 2; i++)
    v[i] = merge<step>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, LANES>());
  if constexpr (2 * step < LANES)
    return sums<2 * step>(v);
  else
    return v[0];
}

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

// P of one head along one axis of n cells. Row i is zero outside [begin, end), because most heads look only nearby.
struct Kernel {
  int n;
  std::vector<float> p, slope_square, slope_linear;  // n x n: P and its derivatives with respect to a_1 and a
  std::vector<int> begin, end;
};

Kernel make_kernel(int n, double square, double linear, bool identity) {
  Kernel K{n, std::vector<float>(n * n), std::vector<float>(n * n), std::vector<float>(n * n),
           std::vector<int>(n), std::vector<int>(n)};
  std::vector<double> row(n);
  auto score = [&](double d) { return identity ? (d == 0 ? 0. : -1e9) : (square * d + linear) * d; };
  for (int i = 0; i < n; i++) {
    double top = score(-i), total = 0, mean_square = 0, mean_linear = 0;
    for (int j = 1; j < n; j++) top = std::max(top, score(j - i));
    int begin = n, end = 0;
    for (int j = 0; j < n; j++) {
      double below = score(j - i) - top;
      row[j] = below < -70 ? 0 : std::exp(below);  // e^-70 is negligible, and denormal numbers are slow
      if (row[j] != 0) begin = std::min(begin, j), end = j + 1;
      total += row[j];
    }
    for (int j = begin; j < end; j++) {
      double d = j - i;
      row[j] /= total;
      mean_square += row[j] * d * d, mean_linear += row[j] * d;
    }
    for (int j = begin; j < end; j++) {
      double d = j - i;
      K.p[i * n + j] = row[j];
      K.slope_square[i * n + j] = row[j] * (d * d - mean_square);
      K.slope_linear[i * n + j] = row[j] * (d - mean_linear);
    }
    K.begin[i] = begin, K.end[i] = end;
  }
  return K;
}

Kernel transposed(const Kernel& K) {
  int n = K.n;
  Kernel T{n, std::vector<float>(n * n), {}, {}, std::vector<int>(n, n), std::vector<int>(n, 0)};
  for (int i = 0; i < n; i++)
    for (int j = K.begin[i]; j < K.end[i]; j++) {
      T.p[j * n + i] = K.p[i * n + j];
      T.begin[j] = std::min(T.begin[j], i), T.end[j] = i + 1;
    }
  return T;
}

// Two planes of a chunk, each h x w x LANES, to which P is applied together.
struct Pair {
  float *a, *b;
};

// Memory layout of one axis of a plane, in units of vectors.
struct Axis {
  int n, stride, lines, step;  // cells in a line and their distance; number of lines and their distance
};

constexpr int ROWS = 4, LINES = 8;  // rows of P that share loads; lines that share a part of P

void mix(const Kernel& K, const Axis& axis, Pair in, Pair out) {
  int n = axis.n;
  for (int line = 0; line < axis.lines; line += LINES)
    for (int i = 0; i < n; i += ROWS) {
      int rows = std::min(ROWS, n - i), begin = n, end = 0;
      const float* p[ROWS];
      for (int r = 0; r < ROWS; r++) {
        int row = std::min(i + r, n - 1);
        p[r] = &K.p[row * n];
        begin = std::min(begin, K.begin[row]), end = std::max(end, K.end[row]);
      }
      for (int o = line; o < std::min(line + LINES, axis.lines); o++) {
        Vec a[ROWS] = {}, b[ROWS] = {};
        for (int j = begin; j < end; j++) {
          int64_t at = int64_t(LANES) * (o * axis.step + j * axis.stride);
          Vec from_a = load(in.a + at), from_b = load(in.b + at);
          for (int r = 0; r < ROWS; r++) a[r] += p[r][j] * from_a, b[r] += p[r][j] * from_b;
        }
        float *to_a = out.a + int64_t(LANES) * (o * axis.step + i * axis.stride), *to_b = out.b + (to_a - out.a);
        for (int r = 0; r < ROWS; r++)
          if (r < rows) store(to_a + r * LANES * axis.stride, a[r]), store(to_b + r * LANES * axis.stride, b[r]);
      }
    }
}

// Adds the gradients of a_1 and a. The gradient of P, the sum of grad[i] in[j] over lines, is multiplied by P's slopes.
void add_kernel_gradient(const Kernel& K, const Axis& axis, Pair grad, Pair in, double* of_square, double* of_linear) {
  int n = axis.n;
  Vec square{}, linear{};
  for (int i = 0; i < n; i += ROWS) {
    int begin = n, end = 0;
    for (int r = 0; r < ROWS && i + r < n; r++)
      begin = std::min(begin, K.begin[i + r]), end = std::max(end, K.end[i + r]);
    for (int j = begin; j < end; j += ROWS) {
      Vec total[ROWS][ROWS] = {};
      int64_t at_i[ROWS], at_j[ROWS];  // past the end, the last cell repeats and its slope is ignored
      for (int r = 0; r < ROWS; r++) {
        at_i[r] = int64_t(LANES) * std::min(i + r, n - 1) * axis.stride;
        at_j[r] = int64_t(LANES) * std::min(j + r, n - 1) * axis.stride;
      }
      for (int o = 0; o < axis.lines; o++) {
        int64_t at = int64_t(LANES) * o * axis.step;
        for (auto [g, x] : {std::pair(grad.a, in.a), std::pair(grad.b, in.b)}) {
          Vec from[ROWS];
          for (int r = 0; r < ROWS; r++) from[r] = load(x + at + at_j[r]);
          for (int q = 0; q < ROWS; q++) {
            Vec to = load(g + at + at_i[q]);
            for (int r = 0; r < ROWS; r++) total[q][r] += to * from[r];
          }
        }
      }
      for (int q = 0; q < ROWS && i + q < n; q++)
        for (int r = 0; r < ROWS && j + r < n; r++) {
          square += K.slope_square[(i + q) * n + j + r] * total[q][r];
          linear += K.slope_linear[(i + q) * n + j + r] * total[q][r];
        }
    }
  }
  *of_square += sum(square), *of_linear += sum(linear);
}

struct Layer : Problem {
  explicit Layer(const Problem& problem) : Problem(problem) {}

  const int64_t tokens = height * width;
  const int h = (height + side - 1) / side, w = (width + side - 1) / side, plane = h * w * LANES;
  const int c = channels / heads, chunks_of_head = (c + LANES - 1) / LANES, chunks = heads * chunks_of_head;
  const Axis along_rows{w, 1, h, w}, along_columns{h, w, w, 1};

  float* statistic(int64_t image, int64_t i) const { return of_tokens + (image * (heads + 2) + i) * tokens; }

  // Calls f(image, first token, number of tokens) for blocks of up to LANES tokens.
  template <class F>
  void for_blocks(F f) const {
    int64_t blocks = (tokens + LANES - 1) / LANES;
    at::parallel_for(0, images * blocks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t first = i % blocks * LANES;
        f(i / blocks, first, int(std::min<int64_t>(LANES, tokens - first)));
      }
    });
  }

  // Calls f(chunk, index of the chunk, scratch memory of this thread) for all chunks of all images.
  template <class F>
  void for_chunks(int planes, F f) const;

  std::vector<Kernel> kernels() const {  // two per head: along rows and along columns
    std::vector<Kernel> all(2 * heads);
    at::parallel_for(0, 2 * heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const float* a = position + 3 * (i / 2);
        all[i] = make_kernel(i % 2 ? h : w, a[0], a[1 + i % 2], identity);
      }
    });
    return all;
  }

  void find_statistics(int64_t image, int64_t first, int n) const {
    const float* token[LANES];  // past the end, the last token repeats
    for (int i = 0; i < LANES; i++) token[i] = x + (image * tokens + first + std::min(i, n - 1)) * channels;
    Vec totals[LANES] = {}, squares[LANES];
    float scale[LANES];
    for (int head = 0; head < heads; head++) {
      const int begin = head * c, end = begin + c;
      if (prenorm)
        for (int i = 0; i < LANES; i++) {
          squares[i] = Vec{};
          for (int j = begin; j < end; j += LANES) {
            Vec v = load(token[i] + j, std::min(LANES, end - j));
            squares[i] += v * v;
          }
        }
      store(scale, prenorm ? rsqrt(sums(squares) / float(c) + float(eps)) : Vec{} + 1);
      store(statistic(image, head) + first, load(scale), n);
      for (int i = 0; i < LANES; i++)
        for (int j = begin; j < end; j += LANES) totals[i] += scale[i] * load(token[i] + j, std::min(LANES, end - j));
    }
    const Vec about = sums(totals) / float(channels);
    float mean[LANES];
    store(mean, about);
    Vec rest[LANES] = {};
    for (int i = 0; i < LANES; i++) squares[i] = Vec{};
    for (int head = 0; head < heads; head++) {
      store(scale, load(statistic(image, head) + first, n));
      for (int i = 0; i < LANES; i++)
        for (int j = head * c; j < (head + 1) * c; j += LANES) {
          const int lanes = std::min(LANES, (head + 1) * c - j);
          Vec d = scale[i] * load(token[i] + j, lanes) - mean[i];
          for (int lane = lanes; lane < LANES; lane++) d[lane] = 0;
          rest[i] += d, squares[i] += d * d;
        }
    }
    const Vec off = sums(rest) / float(channels);  // the rounding error of the mean
    store(statistic(image, heads) + first, about + off, n);
    const Vec total = sums(squares) - off * off * float(channels);
    store(statistic(image, heads + 1) + first, total / float(channels - unbiased), n);
  }
};

// One chunk of a layer. It is `whole` unless it is the last chunk of a head and has fewer than LANES channels.
template <bool whole>
struct Chunk {
  const Layer& layer;
  const int64_t image, index;
  const int64_t head = index / layer.chunks_of_head;
  const int64_t channel = head * layer.c + index % layer.chunks_of_head * LANES;
  const float* scale = layer.statistic(image, head);
  const float *mean = layer.statistic(image, layer.heads), *var = layer.statistic(image, layer.heads + 1);
  const float mean_lambda = layer.mean_lambda[head], var_lambda = layer.var_lambda[head];
  const int channels = whole ? LANES : (head + 1) * layer.c - channel;

  int n() const { return whole ? LANES : channels; }
  int64_t at(int64_t t) const { return (image * layer.tokens + t) * layer.channels + channel; }
  Vec z(int64_t t) const { return scale[t] * load(layer.x + at(t), n()); }
  Vec of_channels(const float* values) const { return load(values + channel, n()); }

  // Calls f(cell, first token, end) for each row of tokens in each cell of row i of the grid.
  template <class F>
  void for_cells(int i, F f) const {
    const int side = layer.side;
    for (int64_t y = i * side; y < std::min<int64_t>((i + 1) * side, layer.height); y++)
      for (int64_t j = 0; j < layer.w; j++)
        f(i * layer.w + j, y * layer.width + j * side, y * layer.width + std::min((j + 1) * side, layer.width));
  }

  float size_of_cell(int i, int j) const {
    return std::min(layer.side, layer.height - i * layer.side) * std::min(layer.side, layer.width - j * layer.side);
  }

  // The shift only needs to be close to the mean over the image, so the mean of some tokens is enough.
  Vec about_mean() const {
    const int64_t step = layer.tokens / 64 + 1;
    Vec total{};
    for (int64_t t = 0; t < layer.tokens; t += step) total += z(t);
    return total / float((layer.tokens + step - 1) / step);
  }

  // Computes the means of z - shift and (z - shift)^2 in each cell.
  void fill(Pair cells, Vec shift) const {
    std::fill_n(cells.a, layer.plane, 0.f), std::fill_n(cells.b, layer.plane, 0.f);
    for (int i = 0; i < layer.h; i++) {
      for_cells(i, [&](int64_t cell, int64_t begin, int64_t end) {
        Vec first = load(cells.a + cell * LANES), second = load(cells.b + cell * LANES);
        for (int64_t t = begin; t < end; t++) {
          Vec v = z(t) - shift;
          first += v, second += v * v;
        }
        store(cells.a + cell * LANES, first), store(cells.b + cell * LANES, second);
      });
      for (int j = 0; j < layer.w; j++) {
        const int64_t at = (i * layer.w + j) * LANES;
        float *a = cells.a + at, *b = cells.b + at, size = size_of_cell(i, j);
        Vec first = load(a) / size;
        store(a, first), store(b, layer.pool_second_moment ? load(b) / size : first * first);
      }
    }
  }
};

template <class F>
void Layer::for_chunks(int planes, F f) const {
  // Some heads look far and take longer. For a single image, this step spreads a head's chunks over the threads.
  int64_t step = images > 1 ? 1 : chunks * 5 / 8 + 1;
  while (std::gcd(step, chunks) > 1) step++;
  at::parallel_for(0, images * chunks, 1, [&](int64_t begin, int64_t end) {
    float* memory = scratch + at::get_thread_num() * int64_t(planes) * plane;
    for (int64_t i = begin; i < end; i++) {
      const int64_t image = i / chunks, index = i % chunks * step % chunks, chunk = image * chunks + index;
      if (c - index % chunks_of_head * LANES >= LANES)
        f(Chunk<true>{*this, image, index}, chunk, memory);
      else
        f(Chunk<false>{*this, image, index}, chunk, memory);
    }
  });
}

struct Forward : Layer {
  using Layer::Layer;
  const std::vector<Kernel> P = kernels();

  void run() const {
    for_blocks([&](int64_t image, int64_t first, int n) { find_statistics(image, first, n); });
    for_chunks(4, [&](const auto& chunk, int64_t, float* memory) {
      normalise(chunk, {memory, memory + plane}, {memory + 2 * plane, memory + 3 * plane});
    });
  }

  template <class C>
  void normalise(const C& chunk, Pair cells, Pair mixed_rows) const {
    const Vec shift = chunk.about_mean();
    store(of_channels + chunk.image * channels + chunk.channel, shift, chunk.n());
    chunk.fill(cells, shift);
    mix(P[2 * chunk.head], along_rows, cells, mixed_rows);
    mix(P[2 * chunk.head + 1], along_columns, mixed_rows, cells);

    const float mean_lambda = chunk.mean_lambda, var_lambda = chunk.var_lambda, epsilon = eps;
    const Vec scale = chunk.of_channels(weight), offset = chunk.of_channels(bias);
    for (int i = 0; i < h; i++)
      chunk.for_cells(i, [&](int64_t cell, int64_t begin, int64_t end) {
        Vec M = load(cells.a + cell * LANES), V = max(load(cells.b + cell * LANES) - M * M, Vec{});
        Vec mean_share = (1 - mean_lambda) * (M + shift), var_share = (1 - var_lambda) * V + epsilon;
        for (int64_t t = begin; t < end; t++) {
          Vec centred = chunk.z(t) - (mean_lambda * chunk.mean[t] + mean_share);
          Vec r = rsqrt(var_lambda * chunk.var[t] + var_share);
          store(this->y + chunk.at(t), centred * r * scale + offset, chunk.n());
        }
      });
  }
};

struct Backward : Layer {
  using Layer::Layer;
  const std::vector<Kernel> P = kernels(), transposed_P = transposed_kernels();

  // Sums over all tokens of a chunk.
  struct Sums {
    double weight[LANES] = {}, bias[LANES] = {}, mean_lambda = 0, var_lambda = 0;
    double square = 0, horizontal = 0, vertical = 0;
  };
  std::vector<Sums> found = std::vector<Sums>(images * chunks);

  std::vector<Kernel> transposed_kernels() const {
    std::vector<Kernel> all;
    for (const Kernel& K : P) all.push_back(transposed(K));
    return all;
  }

  void run() {
    for_chunks(8, [&](const auto& chunk, int64_t index, float* memory) {
      through_neighbourhood(chunk, shares + 2 * tokens * index, found[index], memory);
    });
    for_blocks([&](int64_t image, int64_t first, int n) { through_statistics(image, first, n); });
    add_up();
  }

  // Writes the gradient of z to grad_x, without the part through the token's own statistics.
  template <class C>
  void through_neighbourhood(const C& chunk, float* share, Sums& found, float* memory) const {
    const Pair cells{memory, memory + plane}, mixed_rows{memory + 2 * plane, memory + 3 * plane};
    const Pair mixed{memory + 4 * plane, memory + 5 * plane}, row{memory + 6 * plane, memory + 6 * plane + w * LANES};
    const Kernel *rows = &P[2 * chunk.head], *columns = rows + 1;
    const Kernel *rows_transposed = &transposed_P[2 * chunk.head], *columns_transposed = rows_transposed + 1;
    const Vec shift = chunk.of_channels(of_channels + chunk.image * channels);
    chunk.fill(cells, shift);
    mix(*rows, along_rows, cells, mixed_rows);
    mix(*columns, along_columns, mixed_rows, mixed);
    to_cells(chunk, shift, share, found, mixed, row);

    add_kernel_gradient(*columns, along_columns, mixed, mixed_rows, &found.square, &found.vertical);
    mix(*columns_transposed, along_columns, mixed, mixed_rows);
    add_kernel_gradient(*rows, along_rows, mixed_rows, cells, &found.square, &found.horizontal);
    mix(*rows_transposed, along_rows, mixed_rows, mixed);
    for (int i = 0; i < h; i++)
      chunk.for_cells(i, [&](int64_t cell, int64_t begin, int64_t end) {
        const float size = chunk.size_of_cell(i, cell - i * w);
        Vec of_mean = load(mixed.a + cell * LANES) / size, of_square = 2 * load(mixed.b + cell * LANES) / size;
        if (!pool_second_moment) of_mean += of_square * load(cells.a + cell * LANES), of_square = Vec{};
        for (int64_t t = begin; t < end; t++) {
          float* d = grad_x + chunk.at(t);
          store(d, load(d, chunk.n()) + of_mean + of_square * (chunk.z(t) - shift), chunk.n());
        }
      });
  }

  // Computes the gradients of M - shift and P (z - shift)^2 from the gradient of y, and overwrites M and V with them.
  // Writes the direct part of the gradient of z to grad_x.
  template <class C>
  void to_cells(const C& chunk, Vec shift, float* share, Sums& found, Pair mixed, Pair row) const {
    const float mean_lambda = chunk.mean_lambda, var_lambda = chunk.var_lambda, epsilon = eps;
    const Vec scale = chunk.of_channels(weight);
    Vec ds[LANES], es[LANES];
    int waiting = 0;  // number of tokens in ds and es
    for (int i = 0; i < h; i++) {
      Vec of_weight{}, of_bias{}, of_mean_lambda{}, of_var_lambda{};
      std::fill_n(row.a, 2 * w * LANES, 0.f);
      chunk.for_cells(i, [&](int64_t cell, int64_t begin, int64_t end) {
        const int64_t at = (cell - i * w) * LANES;
        Vec M = load(mixed.a + cell * LANES), V = max(load(mixed.b + cell * LANES) - M * M, Vec{});
        Vec mean_share = (1 - mean_lambda) * (M + shift), var_share = (1 - var_lambda) * V + epsilon;
        Vec d_cell = load(row.a + at), e_cell = load(row.b + at);
        for (int64_t t = begin; t < end; t++) {
          Vec g = load(grad + chunk.at(t), chunk.n());
          Vec r = rsqrt(var_lambda * chunk.var[t] + var_share);
          Vec normalised = (chunk.z(t) - (mean_lambda * chunk.mean[t] + mean_share)) * r;
          of_bias += g, of_weight += g * normalised;
          Vec d = g * scale * r, e = -0.5f * d * normalised * r;  // gradients of z and of the variance
          store(grad_x + chunk.at(t), d, chunk.n());
          d_cell += d, e_cell += e;
          of_mean_lambda -= d * chunk.mean[t], of_var_lambda += e * chunk.var[t];
          ds[waiting] = d, es[waiting] = e;
          if (++waiting == LANES || t + 1 == tokens) {
            const int64_t first = t + 1 - waiting;
            store(share + first, mean_lambda * sums(ds), waiting);
            store(share + tokens + first, var_lambda * sums(es), waiting);
            waiting = 0;
          }
        }
        store(row.a + at, d_cell), store(row.b + at, e_cell);
      });
      for (int j = 0; j < w; j++) {
        float *a = mixed.a + (i * w + j) * LANES, *b = mixed.b + (i * w + j) * LANES;
        Vec M = load(a), V = max(load(b) - M * M, Vec{});
        Vec d_cell = load(row.a + j * LANES), e_cell = load(row.b + j * LANES), of_V = (1 - var_lambda) * e_cell;
        of_mean_lambda += d_cell * (M + shift), of_var_lambda -= e_cell * V;
        store(a, (mean_lambda - 1) * d_cell - 2 * M * of_V), store(b, of_V);
      }
      for (int lane = 0; lane < LANES; lane++) found.weight[lane] += of_weight[lane], found.bias[lane] += of_bias[lane];
      found.mean_lambda += sum(of_mean_lambda), found.var_lambda += sum(of_var_lambda);
    }
  }

  void through_statistics(int64_t image, int64_t first, int n) const {
    Vec d_total{}, e_total{};
    for (int i = 0; i < chunks; i++) {
      const float* share = shares + 2 * tokens * (image * chunks + i) + first;
      d_total += load(share, n), e_total += load(share + tokens, n);
    }
    float of_mean[LANES], of_var[LANES], mean[LANES], scale[LANES], radial[LANES];
    store(of_mean, -d_total / float(channels)), store(of_var, 2 * e_total / float(channels - unbiased));
    store(mean, load(statistic(image, heads) + first, n));
    for (int head = 0; head < heads; head++) {
      store(scale, load(statistic(image, head) + first, n));
      const int64_t at = (image * tokens + first) * channels + head * c;
      Vec along[LANES] = {};
      for (int i = 0; i < n; i++)
        for (int j = 0; j < c; j += LANES) {
          const int lanes = std::min(LANES, c - j);
          float* d = grad_x + at + i * channels + j;
          Vec z = scale[i] * load(x + at + i * channels + j, lanes);
          Vec of_z = load(d, lanes) + (of_mean[i] + of_var[i] * (z - mean[i]));
          along[i] += of_z * z;
          store(d, of_z, lanes);
        }
      if (!prenorm) continue;
      store(radial, sums(along) / float(c) * load(scale));  // the scale of z cancels any change along z itself
      for (int i = 0; i < n; i++)
        for (int j = 0; j < c; j += LANES) {
          const int lanes = std::min(LANES, c - j);
          float* d = grad_x + at + i * channels + j;
          store(d, scale[i] * (load(d, lanes) - radial[i] * load(x + at + i * channels + j, lanes)), lanes);
        }
    }
  }

  void add_up() const {  // sums over an image are in double precision, so each is rounded only once
    for (int64_t i = 0; i < images * chunks; i++) {
      const int64_t index = i % chunks, head = index / chunks_of_head, within = index % chunks_of_head * LANES;
      for (int lane = 0; lane < std::min<int64_t>(LANES, c - within); lane++) {
        grad_weight[head * c + within + lane] += found[i].weight[lane];
        grad_bias[head * c + within + lane] += found[i].bias[lane];
      }
      grad_mean_lambda[head] += found[i].mean_lambda, grad_var_lambda[head] += found[i].var_lambda;
      grad_position[3 * head] += found[i].square;
      grad_position[3 * head + 1] += found[i].horizontal, grad_position[3 * head + 2] += found[i].vertical;
    }
  }
};

}  // namespace

extern "C" {
int dtn_lanes() { return LANES; }
void dtn_forward(const Problem* problem) { Forward(*problem).run(); }
void dtn_backward(const Problem* problem) { Backward(*problem).run(); }
}
