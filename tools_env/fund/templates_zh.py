"""Chinese request templates of the fund assistant, by split and category."""

from tools_env.fund.templates import buy, hard, plain, sell

ACCOUNTS = {"储蓄账户": "savings", "证券账户": "brokerage", "活期账户": "checking"}
MARKETS = {"美股": "US", "港股": "HK", "A股": "CN"}
PERIODS = {"一周": 7, "7天": 7, "10天": 10, "一个月": 30, "30天": 30}
TIMES = ("今天早上", "今天", "昨天", "周五", "周一")
OPENERS = ("", "", "", "你好，", "请问，", "麻烦了，")
CLOSERS = ("", "", "", "谢谢！")

_TRAIN = {
    "balance": (
        *plain(
            "查一下我的余额。",
            "我的{account}余额是多少？",
            "{account}里还有多少钱？",
            "帮我看看{account}的余额。",
            "告诉我{account}现在有多少资金。",
            "我一共有多少现金？",
            "{account}里够不够{amount}？",
            "显示{account}的可用资金。",
            "我想知道{account}还剩多少。",
        ),
        hard("开盘之前，{account}里有多少钱？"),
        hard("今天市场大跌，我的{account}余额是多少？"),
    ),
    "history": (
        *plain(
            "查最近{period}的交易记录。",
            "列出我的{symbol}交易。",
            "最近{period}我转过哪些账？",
            "我上次买{symbol}是什么时候？",
            "给我最近{period}的对账单。",
            "看看{symbol}的历史订单。",
            "最近{period}有没有一笔{amount}的支出？",
            "最近{period}我交易了几次{symbol}？",
            "调出账户的全部流水。",
        ),
        hard("最近{period}盘中我做过哪些交易？"),
        hard("市场下跌之前我卖过{symbol}吗？"),
    ),
    "market": (
        *plain(
            "{market}开盘了吗？",
            "{market}今天几点收盘？",
            "{market}的交易时间是什么？",
            "今天{market}休市吗？",
            "现在股市开着吗？",
            "今天是交易日吗？",
            "{market}几点开盘？",
            "{market}是不是已经收盘了？",
            "帮我看一下{market}的市场状态。",
        ),
        hard("买{symbol}之前先问一句，{market}开盘了吗？"),
        hard("我有{amount}想投资，市场现在开着吗？"),
    ),
    "transfer": (
        *plain(
            "转{amount}到{account}。",
            "把{amount}转入{account}。",
            "我想往{account}转{amount}。",
            "给{account}划{amount}。",
            "请把{amount}挪到{account}。",
            "往{account}里补{amount}。",
            "做一笔{amount}的转账，转到{account}。",
            "{account}需要{amount}，转过去。",
            "从别的账户拿{amount}放进{account}。",
        ),
        hard("市场不稳，先转{amount}到{account}。"),
    ),
    "withdraw": (
        *plain(
            "提现{amount}。",
            "我要取{amount}。",
            "把{amount}提到我的银行卡。",
            "请帮我提{amount}出来。",
            "我今天需要{amount}现金。",
            "赎回{amount}到银行卡。",
            "给我的银行卡打{amount}。",
            "从基金里拿出{amount}给我。",
            "申请提现{amount}。",
        ),
        hard("反正已经收盘了，提现{amount}吧。"),
    ),
    "order": (
        buy("买{quantity}股{symbol}。"),
        buy("用{amount}买{symbol}。"),
        buy("帮我买入{symbol}{quantity}股。"),
        buy("加仓{quantity}股{symbol}。"),
        buy("在{symbol}上投{amount}。"),
        sell("卖{quantity}股{symbol}。"),
        sell("卖出{amount}的{symbol}。"),
        sell("减仓{quantity}股{symbol}。"),
        sell("把{symbol}卖掉{quantity}股。"),
        sell("收盘之前卖掉{quantity}股{symbol}。", hard=True),
        buy("市场开着，买{amount}的{symbol}。", hard=True),
    ),
    "deposit": (
        *plain(
            "我{when}存了{amount}，可以用了吗？",
            "{when}存的{amount}到账了吗？",
            "我{when}往{account}存了{amount}，到了没有？",
            "银行{when}汇出{amount}，你们收到了吗？",
            "我的{amount}存款还在处理中吗？",
            "{when}充值的{amount}什么时候能投资？",
            "{account}怎么没看到我存的{amount}？",
            "我入金{amount}，多久能用？",
            "存进{account}的{amount}入账了没？",
        ),
        hard("收盘后存的{amount}入账了吗？"),
        hard("{when}存的{amount}能买{symbol}了吗？"),
    ),
    "settlement": (
        *plain(
            "我{when}卖了{symbol}，钱什么时候到账？",
            "卖{symbol}的钱什么时候能用？",
            "{when}卖出的{symbol}结算了吗？",
            "我{when}卖了{quantity}股{symbol}，钱怎么还没到？",
            "{symbol}的卖出款哪天到？",
            "卖掉{symbol}以后要等多久才有钱？",
            "{when}清仓了{symbol}，款项到了吗？",
            "卖{symbol}得的{amount}在哪里？",
            "{when}卖{symbol}的钱算我的了吗？",
        ),
        hard("余额里为什么没有{when}卖{symbol}的钱？"),
        hard("{when}卖{symbol}的钱可以提现吗？"),
        hard("收盘前卖的{symbol}，钱到了吗？"),
    ),
    "intraday": (
        *plain(
            "我今天买的{symbol}，收盘前还能卖吗？",
            "今天盘中可以对{symbol}做日内交易吗？",
            "现在下{symbol}的单，收盘前来得及吗？",
            "{symbol}今天能在盘中先买后卖吗？",
            "我的{symbol}单子算今天盘中还是等下次开盘？",
            "现在买{quantity}股{symbol}，收盘前能出来吗？",
            "{symbol}涨了，收盘前止盈还来得及吗？",
            "盘后今天还能交易{symbol}吗？",
            "开盘买的{quantity}股{symbol}当天能卖吗？",
        ),
        hard("{symbol}的单子已经下了，收盘前能成交吗？"),
    ),
}

_TEST = {
    "balance": plain(
        "{account}有多少钱？", "请显示我的{account}余额。", "{account}总共有多少？"
    )
    + (hard("市场这么乱，{account}还有多少钱？"),),
    "history": plain(
        "我想看过去{period}的账户流水。",
        "{symbol}我都做过哪些交易？",
        "打印过去{period}的{symbol}成交记录。",
    )
    + (hard("上次开盘日我买过{symbol}吗？"),),
    "market": plain(
        "{market}现在开市吗？", "{market}收盘了没有？", "{market}今天交易吗，还是休市？"
    )
    + (hard("我可能要卖{symbol}，{market}还开市吗？"),),
    "transfer": plain(
        "请转账{amount}到{account}。",
        "{amount}，划到{account}。",
        "能把{amount}转进{account}吗？",
    )
    + (hard("趁着休市，把{amount}转去{account}。"),),
    "withdraw": plain(
        "请提现{amount}给我。", "我想取出{amount}。", "{amount}提到卡上。"
    )
    + (hard("市场变天之前取{amount}。"),),
    "order": (
        buy("请购买{quantity}股{symbol}。"),
        buy("拿{amount}买入{symbol}。"),
        sell("请卖出我的{quantity}股{symbol}。"),
        sell("趁市场开着，卖{amount}的{symbol}。", hard=True),
    ),
    "deposit": plain(
        "{when}汇的{amount}收到没有？",
        "我{when}入金{amount}，现在能投资吗？",
        "往{account}存的{amount}怎么不显示？",
    )
    + (hard("存的{amount}开盘能用来买{symbol}吗？"),),
    "settlement": plain(
        "{when}卖的{symbol}，什么时候拿到钱？",
        "我{when}把{symbol}卖了，结算完了吗？",
        "卖{quantity}股{symbol}的款到了吗？",
    )
    + (hard("我的余额包括{when}卖{symbol}的钱吗？"),),
    "intraday": plain(
        "今天买的{symbol}能在收盘前卖掉吗？",
        "{symbol}当天盘中来回做一次可以吗？",
        "{quantity}股{symbol}收盘前还能成交吗？",
    )
    + (hard("现在卖{symbol}，算今天盘中的吗？"),),
}

_VALIDATION = {
    "balance": plain("{account}余额多少？", "报一下{account}的资金。"),
    "history": plain("调出最近{period}的记录。", "{symbol}有哪些成交记录？"),
    "market": plain("{market}开始交易了吗？", "{market}什么时候开市？"),
    "transfer": plain("请往{account}转入{amount}。", "转账：{amount}，{account}。"),
    "withdraw": plain("我想提现{amount}。", "取现{amount}。"),
    "order": (buy("下单买{quantity}股{symbol}。"), sell("抛{quantity}股{symbol}。")),
    "deposit": plain(
        "{when}的{amount}存款到了吗？", "我存进{account}的{amount}能花了吗？"
    ),
    "settlement": plain(
        "我{when}卖了{symbol}，钱呢？", "卖{quantity}股{symbol}哪天结算？"
    ),
    "intraday": plain(
        "{symbol}盘中买了能当天卖吗？", "{quantity}股{symbol}赶得上收盘吗？"
    ),
}

REQUESTS = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST}

PHRASES = {
    "train": {
        "transfer": plain("转账{amount}到{account}", "把{amount}转到{account}"),
        "withdraw": plain("提现{amount}", "取{amount}"),
        "order": (
            buy("买{quantity}股{symbol}"),
            sell("卖{quantity}股{symbol}"),
            buy("用{amount}买{symbol}"),
        ),
        "balance": plain("查余额", "看看我的余额"),
        "history": plain("查交易记录", "列出{symbol}的交易"),
        "market": plain("看市场是否开盘", "看{market}开盘没有"),
    },
    "validation": {
        "transfer": plain("划{amount}到{account}"),
        "withdraw": plain("取现{amount}"),
        "order": (buy("下单{quantity}股{symbol}"),),
        "balance": plain("报余额"),
        "history": plain("调出流水"),
        "market": plain("问问市场开没开"),
    },
    "test": {
        "transfer": plain("将{amount}转入{account}"),
        "withdraw": plain("提出{amount}"),
        "order": (buy("买入{quantity}股{symbol}"), sell("卖出{quantity}股{symbol}")),
        "balance": plain("显示我的余额"),
        "history": plain("过一遍{symbol}的成交"),
        "market": plain("确认{market}开市"),
    },
}

CONNECTORS = {
    "train": (
        "{first}再{second}。",
        "先{first}，再{second}。",
        "先{first}，然后{second}。",
        "{first}，接着{second}。",
        "{first}之后{second}。",
        "先{first}，再{second}，最后{third}。",
        "{second}之前先{first}。",
        "我要{second}，但先{first}。",
    ),
    "validation": ("{first}，完了{second}。", "{second}，不过要先{first}。"),
    "test": (
        "请先{first}，随后{second}。",
        "第一步{first}，第二步{second}。",
        "等{first}办完，就{second}。",
        "在{second}以前，请{first}。",
    ),
}
