from transformers import AutoConfig


def load_pretrained_config(model_path):
    def load_config(self):
        config = AutoConfig.from_pretrained(model_path).to_dict()
        config.pop("dtype", None)
        self.__dict__.update(config)

    return load_config
