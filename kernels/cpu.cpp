// The step of the learned optimizer on CPUs: in place, for a table of tensors with one Row each.
// The formulas are those of features.py, which says what they mean. A tensor of any rank is seen as
// (A, X, B, Y, C) with X and Y the two factored axes. A batch is an index (a, b); a row is an index
// (a, x, b) and has N = Y * C contiguous entries, along which the lanes of a register run. Vectors
// that belong to Y are contiguous along a row; those that belong to X repeat every C entries.
//
//   pass 1  row and column sums of g^2; looks for bad entries of g     reads g
//   pass 2  M, V and the sums of squares of the dense features         reads p, g, M, V; writes M, V
//   pass 3  the network and the update                                 reads p, g, M, V; writes p
//
// Between passes 1 and 2 r and c are updated. Normalisers, lambdas, time features and scale are
// folded into the network's first and last layer; no feature is stored. A vector is its own r and c:
// they are six more dense features. Passes run over blocks of ROWS x WIDE entries, each summed in
// float32; sums of blocks are float64, in a fixed order: threads do not change a bit of the result.
// Compile with -DHIDDEN (hidden size), -DLAYERS (hidden layers), -DFEATURES (39, 30 or 29).
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>
#if !defined(PLAIN) && defined(__AVX2__)
#include <immintrin.h>
#endif

struct Row {  // one tensor
    void *p; const void *g; float *M, *V, *r, *c; const float *net;
    int64_t A, X, B, Y, C;
    int32_t kind;              // 0 vector; 1: r belongs to X, c to Y; 2: r belongs to Y, c to X
    int32_t p_dtype, g_dtype;  // 0 float32, 1 bfloat16, 2 float16
    float t, scale, decay, eps;
    int32_t pad;
};

struct Settings {  // of one call
    float lam1, lam2, eps_rms, t_max, anneal, clip;
    int32_t eps_mode;  // 0 reference, 1 fan_in, 2 relative
    int32_t paper;     // 1: time features tanh(t / x) in place of tanh(t / x - 1)
};

#if !defined(PLAIN) && defined(__AVX512F__)
constexpr int W = 16;
#elif !defined(PLAIN) && defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef Vec AnyVec __attribute__((aligned(4), may_alias));  // anywhere in memory

constexpr int H = HIDDEN, ROWS = 32, WIDE = 2048;
constexpr int COLS = std::clamp(4096 / H / W * W, 4 * W, 1024);  // columns at a time in passes 2 and 3
constexpr int STRIDE = COLS + 2 * W;
constexpr bool VELO = FEATURES != 39;
// The dense features as the network takes them: g, [clipped g,] p, M, V, M/sqrt(V), 1/sqrt(V),
// F_grad, [g/sqrt(V)]; then F_mom and, of a vector, r and 1/sqrt(r)
enum { P = VELO ? 2 : 1, M_ = P + 1, V_ = M_ + 3, M_INV = V_ + 1, INV = M_INV + 3, F_GRAD = INV + 1,
       F_MOM = F_GRAD + 3 + (FEATURES == 30), DENSE = F_MOM + 3, DIAGONAL = DENSE + 6 };

static inline Vec all(float x) { return Vec{} + x; }
static inline Vec larger(Vec x, Vec y) { return x > y ? x : y; }

static inline Vec rsqrt(Vec x) {
    x = larger(x, all(FLT_MIN));
#if !defined(PLAIN) && defined(__AVX512F__)
    Vec y = _mm512_mask_rsqrt14_ps(x, -1, x);
#elif !defined(PLAIN) && defined(__AVX2__)
    Vec y = _mm256_rsqrt_ps(x);
    y = y * (1.5f - 0.5f * x * (y * y));
#else
    Vec y;
    for (int l = 0; l < W; l++) y[l] = 1 / std::sqrt(x[l]);
    return y;
#endif
    return y * (1.5f - 0.5f * x * (y * y));  // a Newton step
}

static inline Vec exp(Vec x) {  // 2^n e^f with |f| <= log(2) / 2
    x = x > 88.f ? all(88.f) : x < -87.f ? all(-87.f) : x;
    Vec shifted = x * 1.44269504f + 12582912.f, n = shifted - 12582912.f;  // rounds to an integer
    Vec f = x - n * 0.693359375f + n * 2.12194440e-4f, e = all(1.f / 720);
    for (float k : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) e = e * f + k;
    return (Vec)((Int)e + ((Int)shifted << 23));
}

static inline double total(Vec x) {
    double sum = 0;
    for (int l = 0; l < W; l++) sum += x[l];
    return sum;
}

struct Lanes {  // W entries, of which n exist: only those are read and written
    long n;
#if !defined(PLAIN) && defined(__AVX512F__)
    Vec load(const float *x) const {
        return n >= W ? *(const AnyVec *)x : (Vec)_mm512_maskz_loadu_ps((1u << n) - 1, x);
    }
    void store(float *x, Vec y) const {
        if (n >= W) *(AnyVec *)x = y; else _mm512_mask_storeu_ps(x, (1u << n) - 1, y);
    }
#else
    Vec load(const float *x) const {
        if (n >= W) return *(const AnyVec *)x;
        Vec y{};
        for (int l = 0; l < n; l++) y[l] = x[l];
        return y;
    }
    void store(float *x, Vec y) const {
        if (n >= W) *(AnyVec *)x = y; else for (int l = 0; l < n; l++) x[l] = y[l];
    }
#endif
    Vec mask(Vec x) const {
        for (int l = n; l < W; l++) x[l] = 0;
        return x;
    }
};

// torch.lerp: from + rate (to - from), arranged for a rate near 1 too
struct Lerp {
    Int small; float weight;
    Lerp(float rate) : small(Int{} - (rate < 0.5f)), weight(rate < 0.5f ? rate : rate - 1) {}
    Vec operator()(Vec from, Vec to) const { return (small ? from : to) + weight * (to - from); }
};

static double sum(const float *x, long n) {  // n <= WIDE
    Vec part{};
    for (long i = 0; i < n; i += W) part += Lanes{n - i}.load(x + i);
    return total(part);
}

// bfloat16 and float16

static inline float float_of(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

static inline float from_half(uint16_t h) {
    uint32_t x = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
    float normal = float_of(x + ((x >= 31u << 23 ? 224u : 112u) << 23));
    float small = float_of(x + (113u << 23)) - 0x1p-14f;  // a subnormal
    return float_of(bits_of(x < 1u << 23 ? small : normal) | sign);
}

static inline uint16_t to_half(float y) {  // to the nearest, ties to even
    uint32_t x = bits_of(y) & 0x7fffffff, sign = bits_of(y) >> 16 & 0x8000;
    uint32_t normal = (x - (112u << 23) + 0xfff + (x >> 13 & 1)) >> 13;
    uint32_t small = bits_of(float_of(x) + 0.5f) - 0x3f000000;
    uint32_t big = x > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN or infinity
    return sign | (x >= 0x477ff000 ? big : x < 113u << 23 ? small : normal);
}

static inline uint16_t to_bfloat(float y) {
    uint32_t x = bits_of(y);
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

// x[at:at + n] as float32: in place, or in `copy`
static const float *widened(const void *x, int dtype, long at, long n, float *copy) {
    if (dtype == 0) return (const float *)x + at;
    const uint16_t *y = (const uint16_t *)x + at;
    if (dtype == 1) for (long i = 0; i < n; i++) copy[i] = float_of(uint32_t(y[i]) << 16);
    if (dtype == 2) for (long i = 0; i < n; i++) copy[i] = from_half(y[i]);
    return copy;
}

static void narrow(void *x, int dtype, long at, long n, const float *copy) {
    uint16_t *y = (uint16_t *)x + at;
    if (dtype == 1) for (long i = 0; i < n; i++) y[i] = to_bfloat(copy[i]);
    if (dtype == 2) for (long i = 0; i < n; i++) y[i] = to_half(copy[i]);
}

// Threads: all of them run the same code and share the iterations of `each`

struct Shared { std::atomic<long> ticket{0}, arrived{0}; };

struct Team {
    int size; Shared *shared;
    long first = 0, expected = 0;  // of the next loop's tickets; of arrivals at the next barrier

    template <class F> void each(long n, F f) {  // f(0) to f(n - 1); all done when it returns
        if (size == 1) {
            for (long i = 0; i < n; i++) f(i);
            return;
        }
        for (long i; (i = shared->ticket++ - first) < n;) f(i);
        first += n + size;  // each thread draws one ticket too many
        expected += size;
        shared->arrived++;
        for (int spins = 0; shared->arrived < expected; spins++)
            if (spins > 2000) std::this_thread::yield();
    }
};

struct Work {  // what the threads that work on a tensor share
    std::vector<float> col_sum, row_sum;    // of g^2, (batch, row block, N), (column block, row, C); then means
    std::vector<float> rho_x, rho_y;        // factors of F_grad and F_mom: (3, row, C), (3, batch, N)
    std::vector<double> r_mean;             // (3, batch, C)
    std::vector<double> squares[2], inverse[2];  // sums of x^2 and 1/(x + eps) for x of X and Y: (3, batch)
    std::vector<double> dense;              // sums of squares, (block, DENSE or DIAGONAL)
    std::vector<double> old;                // sums of V, c and g^2 before the step: (block, 5)
    std::atomic<bool> dirty;                // g has entries that must be cleaned
    std::atomic<long> bad{0};
};

struct Own {  // what a thread has for itself
    alignas(64) float g[WIDE + W], p[WIDE + W], lane[WIDE + W], x[6][STRIDE];
    alignas(64) float x_bias[H][STRIDE], y_bias[H][STRIDE];  // products of X's and Y's features with W0
    alignas(64) float w0[DIAGONAL][H], w_x[6][H], w_y[6][H], b0[H], w_last[H][2], b_last[2];
    const float *net = nullptr; float t = 0, timed[H];  // b0 with the time features in it, of this net at t
};

struct Block { long id, q, ix, x0, x1, j0, n; };  // rows x0 to x1 of batch q, n columns from j0

static double inverse_rms(double sum, double n, const Settings &s, float eps) {
    float ms = float(sum) / float(n);
    if (s.eps_mode == 2 || s.eps_rms == 0) return ms <= 1e-28f ? 0 : 1 / std::sqrt(ms);
    return 1 / std::sqrt(ms + s.eps_rms * eps);
}

static float safe(float x, float factor = 1) { return x <= 1e-28f ? 1 : factor * x; }

// y = x W + bias for W (N, M), G outputs at a time
template <int G, int N, int M, class B>
static inline void outputs(const float *w, const Vec *x, Vec *y, int j, B bias) {
    Vec s[G];
    for (int i = 0; i < G; i++) s[i] = bias(j + i);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
        for (int i = 0; i < G; i++) s[i] += w[n * M + j + i] * x[n];
    for (int i = 0; i < G; i++) y[j + i] = s[i];
}

template <int N, int M, class B>
static inline void layer(const float *w, const Vec *x, Vec *y, B bias) {
    if constexpr (M >= 8) for (int j = 0; j + 8 <= M; j += 8) outputs<8, N, M>(w, x, y, j, bias);
    if constexpr (M % 8) outputs<M % 8, N, M>(w, x, y, M / 8 * 8, bias);
}

static inline void relu(Vec *x) {
    for (int h = 0; h < H; h++) x[h] = larger(x[h], Vec{});
}

class Step {
    Team &team; const Settings &s; Row t; Work &work; Own &own;
    const long N = t.Y * t.C, rows = t.A * t.X * t.B, batches = t.A * t.B, size = rows * N;
    const long down = (t.X + ROWS - 1) / ROWS, across = (N + WIDE - 1) / WIDE, blocks = batches * down * across;
    const bool vector = t.kind == 0, relative = s.eps_mode == 2;
    const float *const net = t.net, *const w0 = net + 7, *const rest = w0 + FEATURES * H;  // rest: b0, w1, b1, ...
    const Lerp to_M[3] = {net[0], net[1], net[2]}, to_V{net[3]}, to_rc[3] = {net[4], net[5], net[6]};
    bool dirty = false;
    float unit_V = 1, eps_M = 1e-6f * t.eps, eps_V = eps_M;  // V's divisor, epsilons of M/sqrt(V) and 1/sqrt(V)
    float unit[3] = {1, 1, 1}, eps_rc[3];                    // divisor of r and c, epsilon of 1/sqrt(r)
    float add_grad, add_mom, floor_c[3];                     // rho = rsqrt(max(c + add, floor))
    const float floor_q = relative ? 0 : 1e-30f * t.eps;

    struct Vectors {  // r or c of batch q for one decay: `runs` runs of `n` entries
        float *v; const float *mean; float *rho; long runs, stride, n; bool is_r;
    };

    Vectors vectors(bool of_x, int k, long q) {
        long total = of_x ? rows * t.C : batches * N, count = of_x ? t.X : t.Y, step = of_x ? t.B * t.C : t.C;
        long at = of_x ? (q / t.B * t.X * t.B + q % t.B) * t.C : q * N;
        bool is_r = of_x == (t.kind == 1);
        const float *mean = of_x ? &work.row_sum[at] : &work.col_sum[q * down * N];
        Vectors x{(is_r ? t.r : t.c) + k * total + at, mean, &(of_x ? work.rho_x : work.rho_y)[k * total + at],
                  count, step, t.C, is_r};
        if (step == 1) x.runs = 1, x.n = count;
        return x;
    }

    Block block(long id) const {
        long j = id % across, ix = id / across % down, q = id / across / down;
        return {id, q, ix, ix * ROWS, std::min((ix + 1) * ROWS, t.X), j * WIDE, std::min<long>(WIDE, N - j * WIDE)};
    }

    long row(long q, long x) const { return (q / t.B * t.X + x) * t.B + q % t.B; }

    // n entries of g as float32 and clean; adds to `bad` how many are not finite
    const float *gradient(long at, long n, bool clean, long *bad = nullptr) {
        const float *g = widened(t.g, t.g_dtype, at, n, own.g);
        if (!clean) return g;
        for (long i = 0; i < n; i++) {
            bool finite = (bits_of(g[i]) & 0x7fffffff) < 0x7f800000;
            if (bad) *bad += !finite;
            own.g[i] = finite ? std::min(std::max(g[i], -s.clip), s.clip) : 0;
        }
        return own.g;
    }

    // Pass 1

    // Sums of a row over Y from `own.lane`, whose entry l is for the phase (j0 + l) % C
    void reduce(float *out, long j0, long used) {
        if (t.C == 1) {
            *out = sum(own.lane, used);
            return;
        }
        std::fill(out, out + t.C, 0.f);
        for (long l = 0, c = j0 % t.C; l < used; l++) {
            out[c] += own.lane[l];
            if (++c == t.C) c = 0;
        }
    }

    // False if g must be cleaned first
    bool square(const Block &b, bool clean) {
        long period = t.C < 128 ? std::lcm(t.C, long(W)) : t.C, bad = 0;
        while (period < 4 * W) period *= 2;
        Int largest{};
        std::fill(own.p, own.p + WIDE + W, 0.f);
        for (long x = b.x0; x < b.x1; x++) {
            long i = row(b.q, x), at = 0, used = std::min(period, b.n) + W;
            const float *g = gradient(i * N + b.j0, b.n, clean, &bad);
            std::fill(own.lane, own.lane + used, 0.f);
            for (long j = 0; j < b.n; j += W) {
                Vec y = Lanes{b.n - j}.load(g + j);
                Int bits = (Int)y & 0x7fffffff;
                largest = bits > largest ? bits : largest;  // NaN and infinity are above all numbers
                y *= y;
                *(AnyVec *)(own.p + j) += y;
                *(AnyVec *)(own.lane + at) += y;
                if ((at += W) >= period) at -= period;
            }
            reduce(&work.row_sum[(b.j0 / WIDE * rows + i) * t.C], b.j0, used);
        }
        if (!vector) std::memcpy(&work.col_sum[(b.q * down + b.ix) * N + b.j0], own.p, b.n * 4);
        work.old[5 * b.id + 4] = sum(own.p, b.n);
        if (clean) work.bad += bad;
        int32_t most = 0;
        for (int l = 0; l < W; l++) most = std::max(most, largest[l]);
        return clean || uint32_t(most) <= bits_of(s.clip);
    }

    void first_pass(const Block &b) {
        if (!square(b, false)) work.dirty = true, square(b, true);
        if (!relative) return;
        double *old = &work.old[5 * b.id];
        std::fill(old, old + 4, 0.);
        for (long x = b.x0; x < b.x1; x++) {
            long at = row(b.q, x) * N + b.j0;
            old[0] += sum(t.V + at, b.n);
            for (int k = 0; k < 3 && vector; k++) old[1 + k] += sum(t.c + k * N + at, b.n);
        }
    }

    // Between passes 1 and 2

    // Sums of blocks to means: `chunk` of col_sum, or of row_sum
    void means(long chunk) {
        long chunks = batches * across;
        bool cols = chunk < chunks;
        long j = (cols ? chunk % across : chunk - chunks) * WIDE, q = cols ? chunk / across : 0;
        long count = cols ? down : across, stride = cols ? N : rows * t.C, n = std::min<long>(WIDE, stride - j);
        float *x = cols ? &work.col_sum[q * down * N + j] : &work.row_sum[j];
        for (long i = 0; i < n; i++) {
            double sum = 0;
            for (long k = 0; k < count; k++) sum += x[k * stride + i];
            x[i] = sum / (cols ? t.X : t.Y);
        }
    }

    // r and c of decay k: lerp, sum of squares, and r's mean over d1
    void accumulate(int k, long q) {
        for (bool of_x : {true, false}) {
            Vectors x = vectors(of_x, k, q);
            double squares = 0, *mean = &work.r_mean[(k * batches + q) * t.C];
            if (x.is_r) std::fill(mean, mean + t.C, 0.);
            for (long i = 0; i < x.runs * x.stride; i += x.runs == 1 ? x.n : x.stride) {
                for (long j = 0; j < x.n; j += W) {
                    Lanes in{x.n - j};
                    Vec v = to_rc[k](in.load(x.v + i + j), in.mask(in.load(x.mean + i + j) + floor_q));
                    in.store(x.v + i + j, v);
                    squares += total(v * v);
                    if (x.is_r && t.C == 1) *mean += total(v);
                }
                for (long c = 0; x.is_r && t.C > 1 && c < t.C; c++) mean[c] += x.v[i + c];
            }
            for (long c = 0; x.is_r && c < t.C; c++) mean[c] /= of_x ? t.X : t.Y;
            work.squares[of_x][k * batches + q] = squares;
        }
    }

    // rho and the sum of 1 / (x + eps)
    void factor(int k, long q) {
        for (bool of_x : {true, false}) {
            Vectors x = vectors(of_x, k, q);
            const double *mean = &work.r_mean[(k * batches + q) * t.C];
            float floor = x.is_r ? (relative ? 1e-8f : 1e-9f * t.eps) : floor_c[k];
            double inverse = 0;
            for (long i = 0; i < x.runs * x.stride; i += x.runs == 1 ? x.n : x.stride)
                for (long j = 0; j < x.n; j += W) {
                    Lanes in{x.n - j};
                    Vec v = in.load(x.v + i + j), y = in.mask(rsqrt(v + eps_rc[k]));
                    inverse += total(y * y);
                    if (x.is_r && relative) v /= unit[k];
                    if (x.is_r && !relative)
                        for (int l = 0; l < W; l++) v[l] /= float(mean[t.C == 1 ? 0 : std::min(j + l, t.C - 1)]) + 1e-9f * t.eps;
                    in.store(x.rho + i + j, rsqrt(larger(v, all(floor))));
                }
            work.inverse[of_x][k * batches + q] = inverse;
        }
    }

    // Epsilons and units; those of mode "relative" come from the means of V and r
    void epsilons() {
        add_grad = relative ? 0 : 1e-9f * t.eps;
        add_mom = relative || VELO ? 0 : 1e-6f * t.eps;
        for (int k = 0; k < 3; k++) eps_rc[k] = 1e-8f * t.eps, floor_c[k] = vector ? 0 : 1e-9f * t.eps;
        if (!relative) return;
        double old[5] = {};
        for (long b = 0; b < blocks; b++)
            for (int i = 0; i < 5; i++) old[i] += work.old[5 * b + i] / size;
        float V_mean = old[0] + net[3] * (old[4] - old[0]);
        unit_V = safe(V_mean), eps_M = safe(V_mean, 1e-8f), eps_V = safe(V_mean, 1e-2f);
        for (int k = 0; k < 3; k++) {
            double R = old[1 + k] + net[4 + k] * (old[4] - old[1 + k]);
            if (!vector) R = std::accumulate(&work.r_mean[k * batches * t.C], &work.r_mean[(k + 1) * batches * t.C], 0.) / (batches * t.C);
            unit[k] = safe(R), eps_rc[k] = safe(R, 1e-2f), floor_c[k] = safe(R, 1e-8f);
        }
    }

    // Passes 2 and 3

    // The dense features of W entries; pass 2 moves the accumulators on
    template <bool Vector, bool Second>
    inline void features(Vec *X, Lanes in, long at, Vec g, Vec p, const float *const rho_x[3], const float *const rho_y[3]) {
        Vec V = in.load(t.V + at), q = g * g;
        if (Second) V = to_V(V, q), in.store(t.V + at, V);
        Vec inv_M = rsqrt(V + eps_M), inv_V = relative ? rsqrt(V + eps_V) : inv_M;
        X[0] = g, X[P] = p, X[V_] = V * (1 / unit_V), X[INV] = in.mask(inv_V);
        if (VELO) X[1] = g > 0.1f ? all(0.1f) : g < -0.1f ? all(-0.1f) : g;
        if (FEATURES == 30) X[F_MOM - 1] = g * inv_M;
        for (int k = 0; k < 3; k++) {
            Vec M = in.load(t.M + k * size + at), rho, rho_M;
            if (Second) M = to_M[k](M, g), in.store(t.M + k * size + at, M);
            if (Vector) {
                Vec c = in.load(t.c + k * size + at);
                if (Second) {
                    c = to_rc[k](c, q + floor_q);
                    in.store(t.c + k * size + at, c), in.store(t.r + k * size + at, c);
                }
                rho = rsqrt(larger(c + add_grad, all(floor_c[k]))), rho_M = rsqrt(larger(c + add_mom, all(floor_c[k])));
                X[DENSE + k] = in.mask(c * (1 / unit[k])), X[DENSE + 3 + k] = in.mask(rsqrt(c + eps_rc[k]));
            } else {
                rho = rho_M = *(const AnyVec *)rho_x[k] * in.load(rho_y[k]);
            }
            X[M_ + k] = M, X[M_INV + k] = M * inv_M, X[F_GRAD + k] = g * rho, X[F_MOM + k] = M * rho_M;
        }
    }

    // n entries of a row of X's vectors, from phase j on, as often as lanes may need them
    void repeat(const float *x, long j, long n, float *out) const {
        if (t.C == 1) {
            *(AnyVec *)out = all(*x);
            return;
        }
        long period = std::min<long>(t.C, COLS), c = j % t.C, first = std::min(period, t.C - c);
        std::memcpy(out, x + c, first * 4);
        std::memcpy(out + first, x, (period - first) * 4);
        for (int l = 0; l < W - 1; l++) out[period + l] = out[l];
    }

    // The products of [x, 1/sqrt(x)] with their weights, for n entries of r or c (3, ...)
    void products(const float *const x[3], long n, const float (*w)[H], const float *bias, float (*out)[STRIDE]) {
        for (long j = 0; j < n; j += W) {
            Vec f[6];
            for (int k = 0; k < 3; k++) f[k] = Lanes{n - j}.load(x[k] + j), f[3 + k] = rsqrt(f[k] + eps_rc[k]);
            for (int h = 0; h < H; h++) {
                Vec y = bias ? all(bias[h]) : Vec{};
                for (int k = 0; k < 6; k++) y += w[k][h] * f[k];
                *(AnyVec *)(out[h] + j) = y;
            }
        }
    }

    template <bool Vector>
    inline Vec network(const Vec *X, long j, long phase) {  // scale lam1 d exp(lam2 m)
        constexpr int D = Vector ? DIAGONAL : DENSE;
        Vec y[H], z[H], out[2];
        layer<D, H>(own.w0[0], X, y, [&](int h) {
            return Vector ? all(own.b0[h]) : *(const AnyVec *)(own.y_bias[h] + j) + *(const AnyVec *)(own.x_bias[h] + phase);
        });
        relu(y);
        for (int i = 1; i < LAYERS; i++) {
            const float *w = rest + H + (i - 1) * (H * H + H);
            layer<H, H>(w, y, z, [&](int h) { return all(w[H * H + h]); });
            relu(z);
            std::memcpy(y, z, sizeof y);
        }
        layer<H, 2>(own.w_last[0], y, out, [&](int i) { return all(own.b_last[i]); });
        return out[0] * exp(out[1]);
    }

    template <bool Vector, bool Second>
    void chunk(const Block &b, long j0, long n, Vec *sums) {
        constexpr int D = Vector ? DIAGONAL : DENSE;
        const long NX = rows * t.C, NY = batches * N, y0 = b.q * N + j0;
        const float *x_v = t.kind == 1 ? t.r : t.c, *y_v = t.kind == 1 ? t.c : t.r;
        const long period = std::min<long>(t.C, COLS), wrap = W % period;
        if (!Vector && !Second) {
            const float *const v[3] = {y_v + y0, y_v + NY + y0, y_v + 2 * NY + y0};
            products(v, n, own.w_y, own.b0, own.y_bias);
        }
        for (long x = b.x0; x < b.x1; x++) {
            long i = row(b.q, x), at = i * N + j0, phase = 0;
            if (!Vector) {
                for (int k = 0; k < 3; k++) repeat(&work.rho_x[k * NX + i * t.C], j0, n, own.x[k]);
                if (!Second) {
                    for (int k = 0; k < 3; k++) repeat(x_v + k * NX + i * t.C, j0, n, own.x[3 + k]);
                    const float *const v[3] = {own.x[3], own.x[4], own.x[5]};
                    products(v, period + W - 1, own.w_x, nullptr, own.x_bias);
                }
            }
            const float *g = gradient(at, n, dirty);
            float *p = (float *)widened(t.p, t.p_dtype, at, n, own.p);
            Vec X[D], part[D] = {};
            for (long j = 0; j < n; j += W) {
                Lanes in{n - j};
                const float *const rho_x[3] = {own.x[0] + phase, own.x[1] + phase, own.x[2] + phase};
                const float *const rho_y[3] = {&work.rho_y[0] + y0 + j, &work.rho_y[0] + NY + y0 + j, &work.rho_y[0] + 2 * NY + y0 + j};
                Vec old = in.load(p + j);
                features<Vector, Second>(X, in, at + j, in.load(g + j), old, rho_x, rho_y);
                if (Second) for (int k = 0; k < D; k++) part[k] += X[k] * X[k];
                else in.store(p + j, old - t.decay * old - network<Vector>(X, j, phase));
                if ((phase += wrap) >= period) phase -= period;
            }
            if (Second) for (int k = 0; k < D; k++) sums[k] += part[k];
            else if (t.p_dtype) narrow(t.p, t.p_dtype, at, n, p);
        }
    }

    template <bool Vector, bool Second>
    void pass(const Block &b) {
        constexpr int D = Vector ? DIAGONAL : DENSE;
        Vec sums[D] = {};
        for (long j = 0; j < b.n; j += COLS) chunk<Vector, Second>(b, b.j0 + j, std::min<long>(COLS, b.n - j), sums);
        for (int k = 0; k < D && Second; k++) work.dense[b.id * D + k] = total(sums[k]);
    }

    // b0 with the time features in it, kept for the next tensor
    const float *timed_bias() {
        if (VELO) return rest;
        if (own.net == net && own.t == t.t) return own.timed;
        own.net = net, own.t = t.t;
        std::copy(rest, rest + H, own.timed);
        int k = FEATURES - 11;
        for (float x : {1.f, 3.f, 10.f, 30.f, 100.f, 300.f, 1e3f, 3e3f, 1e4f, 3e4f, 1e5f}) {
            float T = std::tanh(std::min(t.t, s.t_max) / x - (s.paper ? 0 : 1));
            for (int h = 0; h < H; h++) own.timed[h] += T * w0[k * H + h];
            k++;
        }
        return own.timed;
    }

    // After pass 2: this thread's first and last layer
    void fold() {
        constexpr int r = F_MOM;  // where r stands in the network's input; then c, 1/sqrt(r), 1/sqrt(c), F_mom
        const int D = vector ? DIAGONAL : DENSE;
        for (int k = 0; k < D; k++) {
            double sum = 0;
            for (long b = 0; b < blocks; b++) sum += work.dense[b * D + k];
            float norm = inverse_rms(sum, size, s, t.eps);
            int at = k < F_MOM ? k : k < DENSE ? k + 12 : r + (k - DENSE) / 3 * 6 + (k - DENSE) % 3;
            for (int h = 0; h < H; h++) own.w0[k][h] = norm * (w0[at * H + h] + (k < DENSE ? 0 : w0[(at + 3) * H + h]));
        }
        for (int f = 0; f < 6 && !vector; f++)
            for (bool of_x : {true, false}) {
                const std::vector<double> &x = f < 3 ? work.squares[of_x] : work.inverse[of_x];
                double sum = std::accumulate(&x[f % 3 * batches], &x[f % 3 * batches] + batches, 0.);
                double u = f < 3 ? unit[f] : 1;
                float norm = inverse_rms(sum / (u * u), of_x ? rows * t.C : batches * N, s, t.eps) / u;
                int at = r + f / 3 * 6 + f % 3 + (of_x == (t.kind == 1) ? 0 : 3);
                for (int h = 0; h < H; h++) (of_x ? own.w_x : own.w_y)[f][h] = norm * w0[at * H + h];
            }
        std::copy_n(timed_bias(), H, own.b0);
        bool late = !VELO && s.anneal != 0 && t.t > s.t_max;
        float d = s.lam1 * t.scale * (late ? std::pow(s.t_max / t.t, s.anneal) : 1);
        const float *w = rest + H + (LAYERS - 1) * (H * H + H), *b = w + 2 * H;
        for (int h = 0; h < H; h++) own.w_last[h][0] = d * w[2 * h], own.w_last[h][1] = s.lam2 * w[2 * h + 1];
        own.b_last[0] = d * b[0], own.b_last[1] = s.lam2 * b[1];
    }

    void fit() {  // make room
        const int D = vector ? DIAGONAL : DENSE;
        work.dirty = false;
        work.row_sum.resize(across * rows * t.C);
        work.dense.resize(blocks * D), work.old.resize(blocks * 5);
        if (vector) return;
        work.col_sum.resize(batches * down * N);
        work.rho_x.resize(3 * rows * t.C + W), work.rho_y.resize(3 * batches * N + W);
        work.r_mean.resize(3 * batches * t.C);
        for (int i = 0; i < 2; i++) work.squares[i].resize(3 * batches), work.inverse[i].resize(3 * batches);
    }

public:
    Step(Team &team, const Settings &s, const Row &t, Work &work, Own &own) : team(team), s(s), t(t), work(work), own(own) {}

    void run() {
        team.each(1, [&](long) { fit(); });
        team.each(blocks, [&](long i) { first_pass(block(i)); });
        dirty = work.dirty;
        if (!vector) {
            team.each(batches * across + (rows * t.C + WIDE - 1) / WIDE, [&](long i) { means(i); });
            team.each(3 * batches, [&](long i) { accumulate(i / batches, i % batches); });
        }
        epsilons();
        if (!vector) team.each(3 * batches, [&](long i) { factor(i / batches, i % batches); });
        team.each(blocks, [&](long i) { vector ? pass<true, true>(block(i)) : pass<false, true>(block(i)); });
        fold();
        team.each(blocks, [&](long i) { vector ? pass<true, false>(block(i)) : pass<false, false>(block(i)); });
    }
};

static double cost(const Row &t) {  // of a step, in multiplications
    return double(t.A * t.X * t.B * t.Y * t.C) * (100 + DENSE * H + (LAYERS - 1) * H * H);
}

extern "C" void step(const Row *table, long count, const Settings *settings, int threads, long *bad) {
    std::vector<const Row *> small, large;  // small tensors go to one thread each
    double work = 0;
    for (const Row *t = table; t < table + count; t++) {
        if (cost(*t) == 0) continue;
        (cost(*t) < 8e6 || threads == 1 ? small : large).push_back(t);
        work += cost(*t);
    }
    threads = std::max(1, std::min(threads, int(std::min(work / 2.5e6, 1e6))));
    Shared shared;
    Work together;
    std::atomic<long> found{0};
    auto run = [&] {
        Team team{threads, &shared}, alone{1, nullptr};
        Own own;
        Work apart;
        for (const Row *t : large) Step(team, *settings, *t, together, own).run();
        team.each(small.size(), [&](long i) { Step(alone, *settings, *small[i], apart, own).run(); });
        found += apart.bad;
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(run);
    run();
    for (std::thread &x : others) x.join();
    *bad += found + together.bad;
}
