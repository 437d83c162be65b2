/* Vectors of float32 values that fill one register, and functions on them. Compilers would keep wider vectors in memory,
   which is many times slower. */

#include <math.h>

#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Memory layouts of weights: float32; bfloat16; bfloat16 in pairs of inputs; int8 and int8 + 128 in fours of inputs. */
enum { WIDE, NARROW, PAIRS, BYTES, FOURS };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int integers __attribute__((vector_size(4 * LANES), aligned(4)));

static inline vector larger(vector x, vector y)
{
    integers above = x > y;
    return (vector)(((integers)x & above) | ((integers)y & ~above));
}

static inline vector within(vector x, float most)
{
    integers above = x > most, below = x < -most;
    vector edge = (vector){0} + most;
    return (vector)(((integers)x & ~(above | below)) | ((integers)edge & above) | ((integers)-edge & below));
}

/* Compute e^x to two units in the last place with Cody-Waite range reduction. x is clamped to [-87, 87]. */
static inline vector exponential(vector x)
{
    x = within(x, 87.0f);
    vector powers = x * 1.44269504f + 12582912.0f - 12582912.0f; /* rounded to integers */
    vector rest = x - powers * 0.693359375f + powers * 2.12194440e-4f;
    vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (vector)((__builtin_convertvector(powers, integers) + 127) << 23);
}

/* Operation on the inputs of a product: none; a gate with SiLU or the tanh approximation of GELU; ReLU, the tanh
   approximation of GELU or GELU without a gate; or subtraction of the mean before a norm. */
enum { AS_IT_IS, SILU, GELU_TANH, RELU, ALONE_GELU_TANH, ALONE_GELU, CENTRED };
#define GATED(before) ((before) == SILU || (before) == GELU_TANH)

static inline float total(vector x)
{
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += x[lane];
    return sum;
}

/* Compute the total of each of LANES vectors by repeatedly adding adjacent elements of pairs of vectors. */
static inline vector totals(const vector of[LANES])
{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define FOUR(n) n, n + 2, n + 4, n + 6
#if LANES == 16
#define EACH_SECOND(a, b, n) __builtin_shufflevector(a, b, FOUR(n), FOUR(n + 8), FOUR(n + 16), FOUR(n + 24))
#elif LANES == 8
#define EACH_SECOND(a, b, n) __builtin_shufflevector(a, b, FOUR(n), FOUR(n + 8))
#else
#define EACH_SECOND(a, b, n) __builtin_shufflevector(a, b, FOUR(n))
#endif
    vector x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = of[i];
#pragma GCC unroll 4
    for (int number = LANES / 2; number; number /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < number; i++)
            x[i] = EACH_SECOND(x[2 * i], x[2 * i + 1], 0) + EACH_SECOND(x[2 * i], x[2 * i + 1], 1);
    return x[0];
#else
    vector sums;
    for (int i = 0; i < LANES; i++)
        sums[i] = total(of[i]);
    return sums;
#endif
}
