// The step of a learned optimizer on CPUs: in place, for a table of tensors with one Row each. The
// formulas are those of features.py, which says what they mean. Three passes over a tensor:
//
//   1  row and column sums of g^2, search for bad gradients        reads g
//   2  M, V and the sums of squares of the dense features          reads p, g, M, V; writes M, V
//   3  the network and the update                                  reads p, g, M, V; writes p
//
// r and c are updated between passes 1 and 2. No feature is stored: the normalisers, time features,
// lambdas and scale are folded into the first and last layer, and the features of r and c are
// multiplied by their weights once per block. In a vector r = c, whose six features are dense.
//
// A tensor of any rank is (A, X, B, Y, C), where X and Y are the factored axes. A row is an index
// (a, x, b): N = Y * C contiguous entries, along which SIMD lanes run. Passes run over blocks of ROWS
// rows and COLS columns, whose sums in float32 are added in float64 in a fixed order: the result does
// not depend on the number of threads.
// Compile with -DHIDDEN (size), -DLAYERS (hidden layers), -DFEATURES (39 small_fc, 30 velo, 29 velo_paper)
// and -DWIDTH, the floats of a SIMD register: 16 (AVX-512), 8 (AVX2) or 4.
// Built-in functions of gcc and clang stand for those of immintrin.h, which takes long to parse.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

struct Row {  // one tensor
    float *p, *g, *M, *V, *r, *c; const float *net;
    int64_t A, X, B, Y, C;
    int64_t kind;  // 0 vector; 1: r belongs to X and c to Y; 2: r to Y and c to X
    float t, scale, decay, eps;
    long size() const { return A * X * B * Y * C; }
};

struct Settings {  // of one call; `relative` epsilons are 1 or 0; time features are tanh(t / x - shift)
    float lam1, lam2, eps_rms, t_max, anneal, relative, shift;
};

constexpr int W = WIDTH, H = HIDDEN, ROWS = H < 16 ? 32 : 16;
constexpr int NV = W == 16 ? 1 : 2, GROUP = 8 / NV;  // vectors that share a weight, outputs at a time
constexpr int COLS = std::clamp((W == 16 ? 32768 : 8192) / H / W * W, 64, 1024), PADDED = COLS + 4 * W;
constexpr bool VELO = FEATURES != 39;
constexpr float CLIP = VELO ? 1000 : 1e15f;
// Dense features in the network's order: g, [clipped g,] p, M, V, M/sqrt(V), 1/sqrt(V), F_grad,
// [g/sqrt(V),] F_mom; then, for vectors only, c and 1/sqrt(c)
enum { P = 1 + VELO, M_ = P + 1, V_ = M_ + 3, M_INV = V_ + 1, INV = M_INV + 3, F_GRAD = INV + 1,
       F_MOM = F_GRAD + 3 + (FEATURES == 30), DENSE = F_MOM + 3, DIAGONAL = DENSE + 6 };

// ---- SIMD: a Vec is W float32 entries ----

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef Vec Memory __attribute__((aligned(4), may_alias));  // a Vec at any address

static inline Vec all(float x) { return x - Vec{}; }  // broadcast; not x + 0, which turns -0 into +0
static inline Vec load(const float *x) { return *(const Memory *)x; }
static inline void store(float *x, Vec y) { *(Memory *)x = y; }
static inline Vec lerp(Vec a, Vec b, float rate) { return a + rate * (b - a); }

static inline Vec maximum(Vec x, Vec y) {  // NaN where x is NaN, as in torch
#if WIDTH == 16  // compilers emit two instructions for the code below
    asm("vmaxps %1, %2, %0" : "=v"(y) : "v"(x), "v"(y));
    return y;
#endif
    return y > x ? y : x;
}

static inline Vec rsqrt(Vec x) {  // of normal numbers
#if WIDTH == 16
    Vec y = __builtin_ia32_rsqrt14ps512_mask(x, Vec{}, -1);
#elif WIDTH == 8
    Vec y = __builtin_ia32_rsqrtps256(x);
#else
    Vec y;
    for (int l = 0; l < W; l++) y[l] = 1 / std::sqrt(x[l]);
#endif
    return y * (1.5f - 0.5f * x * (y * y));  // a Newton step
}

static inline Vec exp(Vec x) {  // 2^n e^f with |f| <= log(2) / 2
    x = x > 88.f ? all(88.f) : x < -87.f ? all(-87.f) : x;
    const float round = 12582912;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    Vec sum = x * 1.44269504f + round, n = sum - round;
    Vec f = x - n * 0.693359375f + n * 2.12194440e-4f, e = all(1.f / 720);
    for (float k : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) e = e * f + k;
    return (Vec)((Int)e + ((Int)sum << 23));
}

struct Lanes {  // W entries, of which the first n exist
    long n;
    Int mask() const {
        Int lane;
        for (int l = 0; l < W; l++) lane[l] = l;
        return lane < int32_t(n);
    }
    Vec only(Vec x) const { return n >= W ? x : mask() ? x : Vec{}; }
    Vec load(const float *x) const {
        if (n >= W) return ::load(x);
#if WIDTH == 16
        return __builtin_ia32_loadups512_mask(x, Vec{}, (1u << n) - 1);
#elif WIDTH == 8
        return __builtin_ia32_maskloadps256((const Vec *)x, mask());
#endif
        Vec y{};
        for (int l = 0; l < n; l++) y[l] = x[l];
        return y;
    }
    void store(float *x, Vec y) const {
        if (n >= W) return ::store(x, y);
#if WIDTH == 16
        return __builtin_ia32_storeups512_mask(x, y, (1u << n) - 1);
#elif WIDTH == 8
        return __builtin_ia32_maskstoreps256((Vec *)x, mask(), y);
#endif
        for (int l = 0; l < n; l++) x[l] = y[l];
    }
};

static inline double total(Vec x) {
    double sum = 0;
    for (int l = 0; l < W; l++) sum += x[l];
    return sum;
}

static double total(const float *x, long n) {  // for n of the order of COLS
    Vec part{};
    for (long i = 0; i < n; i += W) part += Lanes{n - i}.load(x + i);
    return total(part);
}

// ---- threads: all run the same code and share the iterations of `each` ----

struct Team {
    struct Shared { std::atomic<long> ticket{0}, arrived{0}; };
    int size = 1;
    Shared *shared = nullptr;
    long first = 0, expected = 0;  // this loop's first ticket; arrivals at its end

    template <class F> void each(long n, F f) {  // f(0), ..., f(n - 1), all done when it returns
        for (long i = 0; i < n && size == 1; i++) f(i);
        if (size == 1) return;
        for (long i; (i = shared->ticket++ - first) < n;) f(i);
        first += n + size;  // every thread draws one ticket too many
        expected += size;
        shared->arrived++;
        for (int spins = 0; shared->arrived < expected; spins++)
            if (spins > 2000) std::this_thread::yield();
    }
};

struct Work {  // shared by the threads that work on a tensor. Index 0 is for X's vectors, 1 for Y's
    std::vector<float> sums[2];  // of g^2 by block: (column block, rows * C), (row block, A * B * N)
    std::vector<float> rho[2];   // factors of F_grad and F_mom: (3, rows * C), (3, A * B * N)
    std::vector<double> old;     // sums of g^2, and of V and c before the step: (block, 5)
    std::vector<double> dense;   // sums of squares of the dense features: (block, features)
    double squares[2][6];        // sums of squares of r or c (3) and of 1/sqrt(r or c) (3)
    std::atomic<bool> dirty;     // g has entries that must be cleaned
    std::atomic<int> bad{0};     // how many of them are not finite, in all tensors
};

struct Own {  // buffers of one thread
    alignas(64) float g[PADDED], column[PADDED], d[PADDED], m[PADDED], lane[PADDED];  // of a block's row
    alignas(64) float side[2][6][PADDED];  // a line's rho (3) and vectors (3) of X and Y
    alignas(64) float bias[2][H][PADDED];  // the features of X's and Y's vectors times W0
    float w0[DIAGONAL][H], w_axis[2][6][H], b0[H], w_last[H][2], b_last[2];  // folded
    double mean[COLS];
    std::vector<float> unit;
};

// ---- the network: y = [relu](x w + bias) for w (N, M), G outputs at a time in K partial sums ----

template <int N, int M, int G, bool Relu, class B>
static inline void outputs(const float *w, const Vec (*x)[NV], Vec (*y)[NV], int j, B bias) {
    constexpr int K = N % 4 || G * NV > 4 ? 1 : G * NV > 2 ? 2 : 4;
    Vec s[K][G][NV];
    for (int k = 0; k < K; k++)
        for (int i = 0; i < G * NV; i++) s[k][i / NV][i % NV] = k ? Vec{} : bias(j + i / NV, i % NV);
#pragma GCC unroll W
    for (int n = 0; n < N; n += K)
        for (int k = 0; k < K; k++)
            for (int i = 0; i < G; i++) {
                const Vec weight = all(w[(n + k) * M + j + i]);
                for (int v = 0; v < NV; v++) s[k][i][v] += weight * x[n + k][v];
            }
    for (int i = 0; i < G; i++)
        for (int v = 0; v < NV; v++) {
            for (int k = 1; k < K; k++) s[0][i][v] += s[k][i][v];
            y[j + i][v] = Relu ? maximum(s[0][i][v], Vec{}) : s[0][i][v];
        }
}

template <int N, int M, bool Relu, class B>
static inline void layer(const float *w, const Vec (*x)[NV], Vec (*y)[NV], B bias) {
    for (int j = 0; j + GROUP <= M; j += GROUP) outputs<N, M, GROUP, Relu>(w, x, y, j, bias);
    if constexpr (M % GROUP != 0) outputs<N, M, M % GROUP, Relu>(w, x, y, M / GROUP * GROUP, bias);
}

struct Block { long id, q, x, x1, j, n; };  // rows x to x1 - 1 of batch q = (a, b), n columns from j
struct Axis { float *v; long size, outer, length, inner; bool is_r; };  // vectors of X or Y, (3, size)
static float safe(float x, float factor = 1) { return x <= 1e-28f ? 1 : factor * x; }

struct Step {
    Team &team; const Settings &s; const Row t; Work &work; Own &own;
    const long N = t.Y * t.C, rows = t.A * t.X * t.B, batches = t.A * t.B, size = t.size();
    const bool vector = t.kind == 0, relative = s.relative;
    // Blocks consist of lines. A line is a row or, if rows are short, those of `tall` x and all b, joined:
    // in it, Y's vectors repeat with `period` and X's are spread
    const bool joined = !vector && N < 4 * W && t.B * N <= COLS;
    const long tall = joined ? COLS / (t.B * N) : 1, period = joined ? t.B * N : std::min<long>(t.C, COLS);
    const long down = (t.X + ROWS * tall - 1) / (ROWS * tall), across = (N + COLS - 1) / COLS;
    const long blocks = (joined ? t.A : batches) * down * across;
    const Axis axis[2] = {{t.kind == 1 ? t.r : t.c, rows * t.C, t.A, t.X, t.B * t.C, t.kind == 1},
                          {t.kind == 1 ? t.c : t.r, batches * N, batches, t.Y, t.C, t.kind == 2}};
    const float *const net = t.net, *const w0 = net + 7, *const b0 = w0 + FEATURES * H, *const w1 = b0 + H;
    const float *const rate_M = net, rate_V = net[3], *const rate_rc = net + 4;
    const float e6 = 1e-6f * t.eps, e8 = 1e-8f * t.eps, e9 = 1e-9f * t.eps, floor_q = relative ? 0 : 1e-30f * t.eps;
    // Features are per_V V, M / sqrt(V + eps_M), 1 / sqrt(V + eps_V), and of r (or c) per_r r and
    // 1 / sqrt(r + eps_r). The factors rho of a vector are rsqrt(max(c + add, floor_c))
    float per_V = 1, eps_M = e6, eps_V = e6, per_r[3] = {1, 1, 1}, eps_r[3] = {e8, e8, e8};
    float low = vector ? FLT_MIN : e9, floor_c[3] = {low, low, low};
    const float add_grad = relative ? 0 : e9, add_mom = relative || VELO ? 0 : e6;

    Block block(long i) const {
        long j = i % across * COLS, x = i / across % down * ROWS * tall, q = i / across / down * (joined ? t.B : 1);
        return {i, q, x, std::min(x + ROWS * tall, t.X), j, std::min<long>(COLS, N - j)};
    }

    long length(const Block &b, long x) const { return joined ? std::min(tall, b.x1 - x) * period : b.n; }
    long row(long q, long x) const { return (q / t.B * t.X + x) * t.B + q % t.B; }

    const float *gradient(long at, long n, bool clean) {  // g[at : at + n], cleaned if `clean`
        const float *g = t.g + at;
        if (!clean) return g;
        for (long i = 0; i < n; i++) own.g[i] = std::isfinite(g[i]) ? std::clamp(g[i], -CLIP, CLIP) : 0;
        return own.g;
    }

    // Pass 1; returns false if g may have entries to clean. own.lane has a line's sums at column % span, a multiple
    // of C, and of W if C is small, which avoids store-to-load forwarding stalls
    bool square(const Block &b, bool clean) {
        long span = joined ? COLS : t.C;
        while (span < 128 && (span % W || span < 4 * W)) span *= 2;
        const long longest = length(b, b.x), used = std::min(span, longest) + W;
        double *old = &work.old[5 * b.id];
        std::fill_n(own.column, longest + W, 0.f), std::fill_n(old, 5, 0.);
        for (long x = b.x; x < b.x1; x += tall) {
            const long i = row(b.q, x), at = i * N + b.j, n = length(b, x);
            const float *g = gradient(at, n, clean);
            for (long j = 0; j < n && clean; j++) work.bad += !std::isfinite(t.g[at + j]);
            std::fill_n(own.lane, used, 0.f);
            for (long j = 0, phase = 0; j < n; j += W) {
                Vec y = Lanes{n - j}.load(g + j);
                store(own.column + j, load(own.column + j) + y * y);
                store(own.lane + phase, load(own.lane + phase) + y * y);
                if ((phase += W) >= span) phase -= span;
            }
            float *out = &work.sums[0][(b.j / COLS * rows + i) * t.C];
            std::fill_n(out, joined ? n / t.Y : t.C, 0.f);
            if (joined)
                for (long l = 0; l < n; l += N)
                    for (long c = 0; c < t.C; c++, out++)
                        for (long y = c; y < N; y += t.C) *out += own.lane[l + y];
            else if (t.C == 1) *out = total(own.lane, used);
            else for (long l = 0, c = b.j % t.C; l < used; l++, c = c + 1 == t.C ? 0 : c + 1) out[c] += own.lane[l];
            if (relative) old[1] += total(t.V + at, n);
            for (int k = 0; k < 3 && relative && vector; k++) old[2 + k] += total(t.c + k * N + at, n);
        }
        old[0] = total(own.column, longest);
        const long columns = joined ? period : b.n;
        std::fill_n(own.mean, columns, 0.);
        for (long j = 0; j < longest && !vector; j += columns)
            for (long l = 0; l < columns; l++) own.mean[l] += own.column[j + l];
        float *out = work.sums[1].data() + b.x / (ROWS * tall) * axis[1].size + b.q * N + b.j;
        if (!vector) std::copy_n(own.mean, columns, out);
        return old[0] <= double(CLIP) * CLIP;
    }

    // r and c: the mean of g^2 from the sums of blocks, then a lerp for each decay
    void mix(bool y, long at) {
        const Axis &x = axis[y];
        const long n = std::min<long>(x.size - at, COLS);
        std::fill_n(own.mean, n, 0.);
        for (long part = 0; part < (y ? down : across); part++)
            for (long j = 0; j < n; j++) own.mean[j] += work.sums[y][part * x.size + at + j];
        for (long j = 0; j < n; j++) own.g[j] = own.mean[j] / (y ? t.X : t.Y);
        for (int k = 0; k < 3; k++)
            for (long j = 0; j < n; j += W) {
                float *v = x.v + k * x.size + at + j;
                Lanes in{n - j};
                in.store(v, lerp(in.load(v), load(own.g + j) + floor_q, rate_rc[k]));
            }
    }

    void epsilons() {  // those of mode "relative" follow from the means of V and r
        if (!relative) return;
        const Axis &x = axis[t.kind == 2];  // of r
        double old[5] = {};
        for (long i = 0; i < 5 * blocks; i++) old[i % 5] += work.old[i] / size;
        float V = old[1] + rate_V * (old[0] - old[1]);
        per_V = 1 / safe(V), eps_M = safe(V, 1e-8f), eps_V = safe(V, 1e-2f);
        for (int k = 0; k < 3; k++) {
            double sum = 0;
            for (long i = 0; i < x.size && !vector; i++) sum += x.v[k * x.size + i];
            float r = vector ? old[2 + k] + rate_rc[k] * (old[0] - old[2 + k]) : sum / x.size;
            per_r[k] = 1 / safe(r), eps_r[k] = safe(r, 1e-2f), floor_c[k] = safe(r, 1e-8f);
        }
    }

    // rho = rsqrt(max(r / mean, floor)) with r's mean over its axis (of all r in mode "relative"), or
    // rsqrt(max(c, floor)); and the sums of squares of the features of r or c
    void factor(int k, bool y) {
        const Axis &x = axis[y];
        const bool flat = x.inner == 1;
        const long n = flat ? x.length : x.inner, runs = flat ? 1 : x.length;
        const float floor = !x.is_r ? floor_c[k] : relative ? 1e-8f : e9;
        double squares = 0, inverse = 0;
        own.unit.assign(x.inner + W, x.is_r ? per_r[k] : 1);
        for (long o = 0; o < x.outer; o++) {
            const float *v = x.v + k * x.size + o * x.length * x.inner;
            float *rho = &work.rho[y][v - x.v];
            for (long i = 0; i < x.inner && x.is_r && !relative; i++) {
                double sum = 0;
                for (long l = 0; l < x.length; l++) sum += v[l * x.inner + i];
                own.unit[i] = 1 / (float(sum / x.length) + e9);
            }
            for (long run = 0; run < runs; run++, v += n, rho += n)
                for (long j = 0; j < n; j += W) {
                    Lanes in{n - j};
                    Vec u = in.load(v + j), a = u * per_r[k], b = in.only(rsqrt(u + eps_r[k]));
                    u *= flat ? all(own.unit[0]) : load(&own.unit[j]);
                    in.store(rho + j, rsqrt(maximum(u, all(floor))));
                    squares += total(a * a), inverse += total(b * b);
                }
        }
        work.squares[y][k] = squares, work.squares[y][3 + k] = inverse;
    }

    // The dense features of the W entries at `at`; pass 2 updates the accumulators
    template <bool Vector, bool Second>
    inline void features(Vec *X, Lanes in, long at, Vec g, Vec p, const float *along, const float *around) {
        Vec V = in.load(t.V + at), q = g * g;
        if (Second) V = lerp(V, q, rate_V), in.store(t.V + at, V);
        Vec inv_M = rsqrt(V + eps_M), inv_V = relative ? rsqrt(V + eps_V) : inv_M;
        X[0] = g, X[P] = p, X[V_] = V * per_V, X[INV] = in.only(inv_V);
        if (VELO) X[1] = g > 0.1f ? all(0.1f) : g < -0.1f ? all(-0.1f) : g;
        if (FEATURES == 30) X[F_MOM - 1] = g * inv_M;
        for (int k = 0; k < 3; k++) {
            const long at_k = k * size + at;
            Vec M = in.load(t.M + at_k), rho, rho_M;
            if (Second) M = lerp(M, g, rate_M[k]), in.store(t.M + at_k, M);
            if (Vector) {
                Vec c = in.load(t.c + at_k);
                if (Second) c = lerp(c, q + floor_q, rate_rc[k]), in.store(t.c + at_k, c), in.store(t.r + at_k, c);
                rho = rsqrt(maximum(c + add_grad, all(floor_c[k])));
                rho_M = rsqrt(maximum(c + add_mom, all(floor_c[k])));
                X[DENSE + k] = in.only(c * per_r[k]), X[DENSE + 3 + k] = in.only(rsqrt(c + eps_r[k]));
            } else {
                rho = rho_M = in.load(along + k * PADDED) * load(around + k * PADDED);
            }
            X[M_ + k] = M, X[M_INV + k] = M * inv_M, X[F_GRAD + k] = g * rho, X[F_MOM + k] = M * rho_M;
        }
    }

    // Repeat x, `count` entries, from column j on, with W - 1 more entries for the last lanes
    void repeat(const float *x, long count, long j, float *out) const {
        if (count == 1) return store(out, all(*x));
        long c = j % count, first = std::min(period, count - c);
        std::copy_n(x + c, first, out);
        std::copy_n(x, period - first, out + first);
        for (int l = 0; l < W - 1; l++) out[period + l] = out[l];
    }

    // A line's own.side from X's or Y's vectors at `at`; with `bias`, own.bias: [v, 1/sqrt(v)] times W0
    [[gnu::noinline]] void prepare(bool y, long at, long j, long n, bool bias) {
        for (int k = 0; k < (bias ? 6 : 3); k++) {
            const float *x = (k < 3 ? work.rho[y].data() : axis[y].v) + k % 3 * axis[y].size + at;
            float *out = own.side[y][k];
            if (y == joined) repeat(x, joined ? period : t.C, j, out);
            else if (!joined) std::copy_n(x + j, n, out);
            else for (float *end = out + n; out < end; out += N, x += t.C)  // C entries of x for each row
                if (t.C == 1) for (long l = 0; l < N; l += W) store(out + l, all(*x));
                else for (long l = 0; l < N; l++) out[l] = x[l % t.C];
        }
        for (long i = 0; i < (y == joined ? period + W - 1 : n) && bias; i += W) {
            Vec f[6];
            for (int k = 0; k < 3; k++) f[k] = load(own.side[y][3 + k] + i), f[3 + k] = rsqrt(f[k] + eps_r[k]);
            for (int h = 0; h < H; h++) {
                Vec out = all(y ? own.b0[h] : 0);
                for (int k = 0; k < 6; k++) out += own.w_axis[y][k][h] * f[k];
                store(own.bias[y][h] + i, out);
            }
        }
    }

    // own.d and own.m at j: scale lam1 d and lam2 m
    template <bool Vector> inline void network(const Vec (*X)[NV], long j, const long *phase) {
        Vec hidden[2][H][NV], out[2][NV];
        layer<Vector ? DIAGONAL : DENSE, H, true>(own.w0[0], X, hidden[0], [&](int h, int v) {
            if (Vector) return all(own.b0[h]);
            return load(own.bias[!joined][h] + j + v * W) + load(own.bias[joined][h] + phase[v]);
        });
        for (int i = 0; i < LAYERS - 1; i++) {
            const float *w = w1 + i * (H * H + H), *b = w + H * H;
            layer<H, H, true>(w, hidden[i % 2], hidden[1 - i % 2], [&](int h, int) { return all(b[h]); });
        }
        layer<H, 2, false>(own.w_last[0], hidden[(LAYERS - 1) % 2], out, [&](int i, int) { return all(own.b_last[i]); });
        for (int v = 0; v < NV; v++) store(own.d + j + v * W, out[0][v]), store(own.m + j + v * W, out[1][v]);
    }

    template <bool Vector, bool Second> void pass(const Block &b) {  // 2 or 3
        constexpr int D = Vector ? DIAGONAL : DENSE;
        const long wrap = W % period, ahead = across > 1 && !Vector ? N * t.B : 512;  // entries to prefetch
        Vec sums[D] = {};
        if (!Vector) prepare(true, b.q * N, b.j, b.n, !Second);
        for (long x = b.x; x < b.x1; x += tall) {
            const long i = row(b.q, x), at = i * N + b.j, n = length(b, x);
            if (!Vector) prepare(false, i * t.C, b.j, n, !Second);
            const float *g = gradient(at, n, work.dirty);
            float *p = t.p + at;
            Vec X[D][NV], part[D] = {};
            for (long j = 0, phase = 0, phases[NV]; j < n; j += NV * W) {
                for (const float *x : {t.M, t.M + size, t.M + 2 * size, t.V, t.p, t.g})
                    __builtin_prefetch(x + at + j + ahead);
                for (int v = 0; v < NV; v++) {
                    const long l = j + v * W;
                    Lanes in{n - l};
                    Vec x[D];
                    const float *along = own.side[!joined][0] + l, *around = own.side[joined][0] + phase;
                    features<Vector, Second>(x, in, at + l, in.load(g + l), in.load(p + l), along, around);
                    for (int k = 0; k < D; k++) Second ? part[k] += x[k] * x[k] : X[k][v] = x[k];
                    phases[v] = phase;
                    if ((phase += wrap) >= period) phase -= period;
                }
                if (!Second) network<Vector>(X, j, phases);
            }
            for (int k = 0; k < D && Second; k++) sums[k] += part[k];
            for (long j = 0; j < n && !Second; j += W) {  // a loop of its own: exp has a long latency
                Vec old = Lanes{n - j}.load(p + j), update = load(own.d + j) * exp(load(own.m + j));
                Lanes{n - j}.store(p + j, old - t.decay * old - update);
            }
        }
        for (int k = 0; k < D && Second; k++) work.dense[b.id * D + k] = total(sums[k]);
    }

    float inverse_rms(double sum, long n) const {
        float ms = float(sum) / n;
        if (relative || s.eps_rms == 0) return ms <= 1e-28f ? 0 : 1 / std::sqrt(ms);
        return 1 / std::sqrt(ms + s.eps_rms * t.eps);
    }

    // The first layer with 1 / RMS of the features in it, the last one with lambdas and scale. The
    // rows of W0: dense features without F_mom, r, c, 1/sqrt(r), 1/sqrt(c), F_mom, time
    void fold() {
        const int D = vector ? DIAGONAL : DENSE;
        double sums[DIAGONAL] = {};
        for (long b = 0; b < blocks; b++)
            for (int k = 0; k < D; k++) sums[k] += work.dense[b * D + k];
        for (int k = 0; k < D; k++) {
            float norm = inverse_rms(sums[k], size);
            int at = k < F_MOM ? k : k < DENSE ? k + 12 : F_MOM + (k - DENSE) / 3 * 6 + (k - DENSE) % 3;
            const float *w = w0 + at * H, *w_c = w + 3 * H;
            for (int h = 0; h < H; h++) own.w0[k][h] = norm * (k < DENSE ? w[h] : w[h] + w_c[h]);
        }
        for (int i = 0; i < 12 && !vector; i++) {
            int y = i / 6, k = i % 6, at = F_MOM + k / 3 * 6 + k % 3 + (axis[y].is_r ? 0 : 3);
            float norm = inverse_rms(work.squares[y][k], axis[y].size) * (k < 3 ? per_r[k] : 1);
            for (int h = 0; h < H; h++) own.w_axis[y][k][h] = norm * w0[at * H + h];
        }
        std::copy_n(b0, H, own.b0);
        const float *w = w0 + (FEATURES - 11) * H;
        for (float x : {1.f, 3.f, 10.f, 30.f, 100.f, 300.f, 1e3f, 3e3f, 1e4f, 3e4f, 1e5f}) {
            if (VELO) break;
            float feature = std::tanh(std::min(t.t, s.t_max) / x - s.shift);
            for (int h = 0; h < H; h++) own.b0[h] += feature * *w++;
        }
        float annealing = !VELO && t.t > s.t_max ? std::pow(s.t_max / t.t, s.anneal) : 1;
        w = w1 + (LAYERS - 1) * (H * H + H);
        const float scale[2] = {s.lam1 * t.scale * annealing, s.lam2};
        for (int i = 0; i < 2 * H; i++) own.w_last[i / 2][i % 2] = scale[i % 2] * w[i];
        for (int i = 0; i < 2; i++) own.b_last[i] = scale[i] * w[2 * H + i];
    }

    void run() {
        team.each(1, [&](long) {
            work.dirty = false;
            work.dense.resize(blocks * DIAGONAL), work.old.resize(blocks * 5);
            work.sums[0].resize(across * axis[0].size), work.sums[1].resize(vector ? 0 : down * axis[1].size);
            for (int y = 0; y < 2; y++) work.rho[y].resize(vector ? 0 : 3 * axis[y].size);
        });
        team.each(blocks, [&](long i) {
            if (!square(block(i), false)) work.dirty = true, square(block(i), true);
        });
        for (int y = 0; y < 2 && !vector; y++)
            team.each((axis[y].size + COLS - 1) / COLS, [&](long i) { mix(y, i * COLS); });
        epsilons();
        if (!vector) team.each(6, [&](long i) { factor(i % 3, i / 3); });
        team.each(blocks, [&](long i) { vector ? pass<true, true>(block(i)) : pass<false, true>(block(i)); });
        fold();
        team.each(blocks, [&](long i) { vector ? pass<true, false>(block(i)) : pass<false, false>(block(i)); });
    }
};

static double cost(const Row *t, int count = 1) {  // about the number of multiplications
    double sum = 0;
    for (; count-- > 0; t++) sum += double(t->size()) * (100 + DENSE * H + (LAYERS - 1) * H * H);
    return sum;
}

// Call f(team) in as many threads as the work is for, at most `threads`
template <class F> static void together(double work, int threads, F f) {
    Team::Shared shared;
    std::atomic<int> size{0};  // of the team: known once all threads have been started
    auto run = [&] {
        while (!size) std::this_thread::yield();
        f(Team{size, &shared});
    };
    std::vector<std::thread> others;
    try {
        for (int i = 2; i <= std::min<double>(threads, work); i++) others.emplace_back(run);
    } catch (const std::system_error &) {}  // no more threads: those that started do the work
    size = others.size() + 1;
    run();
    for (std::thread &other : others) other.join();
}

// Returns the number of gradient entries that are not finite
extern "C" int step(const Row *table, int count, const Settings *settings, int threads) {
    std::vector<const Row *> small, large;  // one thread works on a small tensor, all on a large one
    for (const Row *t = table; t < table + count; t++) (cost(t) < 8e6 ? small : large).push_back(t);
    Work shared_work;
    together(cost(table, count) / 2.5e6, threads, [&](Team team) {
        Team single;
        Work own_work;
        const std::unique_ptr<Own> own(new Own);  // not cleared
        for (const Row *t : large) Step{team, *settings, *t, shared_work, *own}.run();
        team.each(small.size(), [&](long i) { Step{single, *settings, *small[i], own_work, *own}.run(); });
        shared_work.bad += own_work.bad;
    });
    return shared_work.bad;
}

static double sum(const float *x, long n, float mean, bool square) {  // of x - mean, or of its squares
    Vec sums[4] = {};  // hides the latency of additions
    for (long i = 0, k = 0; i < n; i += W, k = (k + 1) % 4) {
        Lanes in{n - i};
        Vec y = in.only(in.load(x + i) - mean);
        sums[k] += square ? y * y : y;
    }
    return total(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// features.tensor_statistics of each tensor, (count, 8). Chunks that fit in the cache are read twice
extern "C" void statistics(const Row *table, int count, float *out, int threads) {
    std::vector<double> means(5 * count), variances(5 * count);  // of p, M_1, M_2, M_3 and V
    together(cost(table, count) / 2.5e7, threads, [&](Team team) {
        team.each(5 * count, [&](long job) {
            const Row &t = table[job / 5];
            const long k = job % 5, size = t.size(), chunk = 4096;
            const float *x = k == 0 ? t.p : k < 4 ? t.M + (k - 1) * size : t.V;
            double mean = 0, squares = 0;  // of the first `at` entries; the mean of p counts as 0
            for (long at = 0; at < size; at += chunk) {
                const long n = std::min(chunk, size - at);
                const double part = k ? sum(x + at, n, 0, false) / n : 0, d = part - mean;
                squares += sum(x + at, n, part, true) + d * d * at * n / (at + n);
                mean += d * n / (at + n);
            }
            means[job] = mean, variances[job] = squares / size;
        });
    });
    auto squash = [](float x) { return 0.5f * std::clamp(std::log(1e-8f + std::abs(10 * x)), -5.f, 5.f); };
    for (const double *m = means.data(), *v = variances.data(); count--; m += 5, v += 5, out += 8) {
        const float by = 1 / std::sqrt(std::max(float(v[0]), 1e-9f));
        out[0] = v[0], out[1] = squash(m[4] * by);
        for (int k = 1; k < 4; k++) {
            out[1 + k] = squash(v[k] * by * by);
            out[4 + k] = squash((v[4] + (m[4] - m[k]) * (m[4] - m[k])) * by * by);
        }
    }
}
