// Trains the desk net with an exported learned optimizer in C++, with libtorch and TorchScript:
//   cmake -S examples/cpp -B build/cpp -DCMAKE_BUILD_TYPE=Release
//       -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
//   cmake --build build/cpp && build/cpp/train exported
// libtorch must be of the version of torch that exported: TorchScript is no longer developed.
#include <ATen/Parallel.h>
#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

using torch::Tensor;

constexpr int64_t kInputs = 64, kWidth = 64, kClasses = 10, kBatch = 64, kSteps = 200;

struct Param {
  Tensor p;                    // (out, in), or (n) for a bias
  double scale;                // under μP: 1 / fan_in for hidden weights; 1 for 64 inputs (input_base)
  std::vector<Tensor> state;   // M, V, r, c

  bool tall() const { return p.dim() == 2 && p.size(0) >= p.size(1); }
  // As a graph wants it: (b, n), or (b, e, m, n) with n the larger axis.
  Tensor to_graph(const Tensor& x) const {
    if (x.dim() == 1) return x.unsqueeze(0);
    return (tall() ? x.t() : x).contiguous().unsqueeze(0).unsqueeze(0);
  }
  Tensor from_graph(const Tensor& x) const {
    if (x.dim() == 2) return x.squeeze(0);
    return tall() ? x[0][0].t().contiguous() : x[0][0];
  }
};

Tensor read(std::ifstream& file, std::vector<int64_t> shape, torch::ScalarType type) {
  Tensor x = torch::empty(shape, type);
  if (!file.read(static_cast<char*>(x.data_ptr()), x.nbytes()))
    throw std::runtime_error("desk.bin is too short: run python examples/desk.py");
  return x;
}

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "exported";
  at::set_num_threads(1);
  for (const std::string file : {"desk.bin", "mulo_m.ts"})
    if (!std::ifstream(folder + "/" + file))
      throw std::runtime_error("no " + folder + "/" + file +
                               ": run python export.py mulo_m && python examples/desk.py");
  torch::jit::Module graphs = torch::jit::load(folder + "/mulo_m.ts");

  std::ifstream file(folder + "/desk.bin", std::ios::binary);
  std::vector<Param> params;
  const std::vector<int64_t> sizes{kInputs, kWidth, kWidth, kClasses};
  for (size_t k = 0; k + 1 < sizes.size(); ++k) {
    const double scale = k == 1 ? 1.0 / sizes[k] : 1.0;
    params.push_back({read(file, {sizes[k + 1], sizes[k]}, torch::kFloat), scale, {}});
    params.push_back({read(file, {sizes[k + 1]}, torch::kFloat), 1.0, {}});
  }
  for (auto& param : params) {
    const Tensor p = param.to_graph(param.p);
    const Tensor M = torch::zeros_like(p).unsqueeze(1).repeat_interleave(3, 1);
    param.state = p.dim() == 2
                      ? std::vector<Tensor>{M, torch::zeros_like(p), M, M}
                      : std::vector<Tensor>{M, torch::zeros_like(p), M.narrow(-1, 0, 1).contiguous(),
                                            M.narrow(-2, 0, 1).contiguous()};
  }
  const Tensor x = read(file, {kSteps + 1, kBatch, kInputs}, torch::kFloat);
  const Tensor y = read(file, {kSteps + 1, kBatch}, torch::kInt).to(torch::kLong);

  auto loss_on = [&](int64_t t) {
    Tensor z = x[t];
    for (size_t k = 0; k < params.size(); k += 2) {
      z = torch::linear(k ? z.relu() : z, params[k].p, params[k + 1].p);
    }
    return torch::cross_entropy_loss(z / kWidth, y[t]);  // μP divides the output by its fan_in
  };

  for (int64_t t = 0; t < kSteps; ++t) {
    for (auto& param : params) param.p = param.p.detach().requires_grad_();
    const Tensor loss = loss_on(t);
    loss.backward();
    torch::NoGradGuard no_grad;
    for (auto& param : params) {
      std::vector<torch::jit::IValue> inputs{param.to_graph(param.p), param.to_graph(param.p.grad())};
      inputs.insert(inputs.end(), param.state.begin(), param.state.end());
      for (const double value : {double(t), param.scale, 0.0}) inputs.push_back(torch::full({1}, value));
      const auto graph = graphs.get_method(param.p.dim() == 1 ? "vector" : "tensor");
      const auto out = graph(inputs).toTuple()->elements().vec();
      param.p = param.from_graph(out[0].toTensor());
      for (size_t i = 0; i < param.state.size(); ++i) param.state[i] = out[i + 1].toTensor();
    }
    if (t % 50 == 0) std::cout << "step " << t << ": " << loss.item<float>() << "\n";
  }
  torch::NoGradGuard no_grad;
  std::cout.precision(9);
  std::cout << "loss " << loss_on(kSteps).item<float>() << std::endl;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
