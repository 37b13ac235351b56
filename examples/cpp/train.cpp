// Trains the desk net with an exported learned optimizer in C++, with libtorch and TorchScript:
//   cmake -S examples/cpp -B build/cpp -DCMAKE_BUILD_TYPE=Release
//       -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
//   cmake --build build/cpp && build/cpp/train exported
// libtorch must be of the version of torch that exported: TorchScript is no longer developed.
#include <torch/script.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <vector>

using torch::Tensor;

constexpr int64_t kInputs = 64, kWidth = 64, kClasses = 10, kBatch = 64, kSteps = 200;

struct Param {
  Tensor p;
  double lr_scale;             // under μP: 1 / fan_in for hidden weights
  std::vector<Tensor> state;   // second_moment, momentum, row, col
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
  const std::vector<std::string> kinds{"matrix", "tall", "vector"};
  std::vector<std::string> files{"desk.bin"};
  for (const auto& kind : kinds) files.push_back("mulo_m." + kind + ".ts");
  for (const auto& file : files)
    if (!std::ifstream(folder + "/" + file))
      throw std::runtime_error("no " + folder + "/" + file +
                               ": run python export.py mulo_m && python examples/desk.py");
  std::map<std::string, torch::jit::Module> graphs;
  for (const auto& kind : kinds) graphs[kind] = torch::jit::load(folder + "/mulo_m." + kind + ".ts");

  std::ifstream file(folder + "/desk.bin", std::ios::binary);
  std::vector<Param> params;
  const std::vector<int64_t> sizes{kInputs, kWidth, kWidth, kClasses};
  for (size_t k = 0; k + 1 < sizes.size(); ++k) {
    const double scale = k == 1 ? 1.0 / sizes[k] : 1.0;
    params.push_back({read(file, {sizes[k + 1], sizes[k]}, torch::kFloat), scale, {}});
    params.push_back({read(file, {sizes[k + 1]}, torch::kFloat), 1.0, {}});
  }
  for (auto& [p, scale, state] : params) {
    auto zeros = [](std::vector<int64_t> shape) { return torch::zeros(shape); };
    std::vector<int64_t> shape = p.sizes().vec(), momentum{1, 3};
    momentum.insert(momentum.end(), shape.begin(), shape.end());
    state = {torch::zeros_like(p).unsqueeze(0), zeros(momentum), zeros({1, 3, shape.front()}),
             zeros({1, 3, shape.back()})};
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
    std::vector<Tensor> leaves;
    for (auto& param : params) leaves.push_back(param.p.requires_grad_());
    const Tensor loss = loss_on(t);
    const auto grads = torch::autograd::grad({loss}, leaves);
    torch::NoGradGuard no_grad;
    for (size_t k = 0; k < params.size(); ++k) {
      auto& [p, scale, state] = params[k];
      const char* kind = p.dim() == 1 ? "vector" : p.size(0) >= p.size(1) ? "tall" : "matrix";
      std::vector<torch::jit::IValue> inputs{p.detach().unsqueeze(0), grads[k].unsqueeze(0)};
      inputs.insert(inputs.end(), state.begin(), state.end());
      inputs.push_back(torch::tensor(float(t)));
      inputs.push_back(torch::full({1}, scale));
      const auto out = graphs[kind].forward(inputs).toTuple()->elements().vec();
      p = out[0].toTensor().squeeze(0);
      for (size_t i = 0; i < state.size(); ++i) state[i] = out[i + 1].toTensor();
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
